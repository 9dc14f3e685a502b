"""Requests and answers as they travel through Redis, shared by the gateway and the inference workers.

``requests`` is one stream with a consumer group; ``reply:<id>`` is a stream of events that expires. A request
is owned by one worker at a time (``owner:<id>``); events are appended by a script that checks the owner, so a
worker that was thought dead and wakes up can't mix its events into those of its successor. ``cancel:<id>``
exists where nobody wants the answer any more. Workers announce themselves in ``inference:workers``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ernie5.protocol.errors import WireError
from ernie5.protocol.generation import (
    DoneEvent,
    ErrorEvent,
    Event,
    GenerationParams,
    Request,
    SpanEvent,
    TokenEvent,
    Usage,
)
from ernie5.protocol.wire import decode_sequence, decode_span, encode_sequence, encode_span

REQUESTS = "requests"
GROUP = "inference"
WORKERS = "inference:workers"
WORKERS_INFO = "inference:workers:info"

# ARGV: worker, seconds to keep, number of events written before, then for each event the number of its fields
# and these. Events that are there already are skipped, so that a call repeated after a lost connection adds
# nothing twice. Answers 0 where another worker owns the request.
APPEND = """#!lua
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
local skip = redis.call('XLEN', KEYS[1]) - tonumber(ARGV[3])
local i = 4
while i <= #ARGV do
  local n = tonumber(ARGV[i])
  if skip > 0 then
    skip = skip - 1
  else
    redis.call('XADD', KEYS[1], '*', unpack(ARGV, i + 1, i + n))
  end
  i = i + n + 1
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
"""
# Tells the group that this worker still works on an entry, unless another has taken it over.
KEEP = """#!lua
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[1], 0, ARGV[3], 'JUSTID')
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
"""
# Ends an entry; the owner alone may.
FINISH = """#!lua
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('XACK', KEYS[1], ARGV[2], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
redis.call('DEL', KEYS[2])
return 1
"""
# Announces a worker for ARGV[3] seconds and forgets those whose time is over.
ANNOUNCE = """#!lua
local now = tonumber(redis.call('TIME')[1])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. now)) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('HDEL', KEYS[2], gone)
end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""
# Infos of the workers whose time is not over.
WORKERS_ALIVE = """#!lua flags=no-writes
local now = tonumber(redis.call('TIME')[1])
local infos = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')) do
  local info = redis.call('HGET', KEYS[2], worker)
  if info then infos[#infos + 1] = info end
end
return infos
"""
# Gives an entry back: with an idle time beyond any threshold the next worker claims it at once.
RELEASE = """#!lua
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[1], 0, ARGV[3], 'IDLE', 2000000000, 'JUSTID')
redis.call('DEL', KEYS[2])
return 1
"""


def reply_key(request_id: str) -> str:
    return f"reply:{request_id}"


def owner_key(request_id: str) -> str:
    return f"owner:{request_id}"


def cancel_key(request_id: str) -> str:
    return f"cancel:{request_id}"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says about itself: names of its models and the tokenizers they were trained with."""

    models: tuple[str, ...]
    text_vocabulary: int
    tokenizers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    created: int = 0

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"tokenizers": dict(self.tokenizers)})

    @classmethod
    def from_json(cls, text: bytes | str) -> WorkerInfo:
        value = json.loads(text)
        return cls(
            tuple(value["models"]),
            value["text_vocabulary"],
            value.get("tokenizers", {}),
            value.get("created", 0),
        )


def request_fields(request: Request) -> dict[str | bytes, str | bytes]:
    """The fields of an entry of ``requests``."""
    return {
        "id": request.id,
        "model": request.model,
        "sequence": encode_sequence(request.sequence),
        "params": request.params.model_dump_json(exclude_defaults=True),
    }


def read_request(fields: Mapping[bytes, bytes]) -> Request:
    """The request of an entry; ``WireError`` when it is none."""
    try:
        return Request(
            id=fields[b"id"].decode(),
            model=fields[b"model"].decode(),
            sequence=decode_sequence(fields[b"sequence"]),
            params=GenerationParams.model_validate_json(fields[b"params"]),
        )
    except (KeyError, ValueError) as error:
        raise WireError(f"request can't be read: {error}") from None


def event_fields(event: Event) -> list[str | bytes]:
    """Names and values, alternating, of an entry of ``reply:<id>``."""
    if isinstance(event, TokenEvent):
        return ["kind", "token", "token", str(event.token)]
    if isinstance(event, SpanEvent):
        return ["kind", "span", "span", encode_span(event.span)]
    if isinstance(event, DoneEvent):
        usage = json.dumps(dataclasses.asdict(event.usage))
        return ["kind", "done", "finish_reason", event.finish_reason, "usage", usage]
    error = {"message": event.message, "type": event.type, "param": event.param, "status": event.status}
    return ["kind", "error", "error", json.dumps(error)]


def read_event(request_id: str, fields: Mapping[bytes, bytes]) -> Event:
    """The event of an entry; ``WireError`` when it is none."""
    kind = fields.get(b"kind")
    try:
        if kind == b"token":
            return TokenEvent(request_id, int(fields[b"token"]))
        if kind == b"span":
            return SpanEvent(request_id, decode_span(fields[b"span"]))
        if kind == b"done":
            reason: Any = fields[b"finish_reason"].decode()
            return DoneEvent(request_id, reason, Usage(**json.loads(fields[b"usage"])))
        if kind == b"error":
            return ErrorEvent(request_id, **json.loads(fields[b"error"]))
    except (KeyError, ValueError, TypeError) as error:
        raise WireError(f"event can't be read: {error}") from None
    raise WireError(f"event of unknown kind {kind!r}")


def append_arguments(worker: str, keep_s: int, written: int, events: Sequence[Event]) -> list[str | bytes]:
    """The arguments of ``APPEND``; ``written`` events are there already."""
    arguments: list[str | bytes] = [worker, str(keep_s), str(written)]
    for event in events:
        fields = event_fields(event)
        arguments += [str(len(fields)), *fields]
    return arguments
