"""The inference worker: takes requests from the stream into an engine's running batch and writes its events.

The engine is given from outside and knows no Redis. A request's events in ``reply:<id>`` are its whole state,
so a worker that dies loses nothing: after ``claim_after_s`` of silence another claims the request, hands the
events to its engine and goes on.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import redis
from pydantic import Field
from redis.exceptions import RedisError, ResponseError

from ernie5.protocol.errors import ErnieMultiError, UnavailableError
from ernie5.protocol.generation import DoneEvent, Engine, ErrorEvent, Event, Request
from ernie5.protocol.settings import Settings
from ernie5.services import generation_stream as wire
from ernie5.services.redis_client import unavailable_on_loss

logger = logging.getLogger(__name__)

_RETRY_S = 0.5

Seconds = Annotated[float, Field(gt=0)]


class InferenceSettings(Settings):
    """Times of a worker.

    ``claim_after_s``: silence after which another worker takes over; ``stall_after_s``: a step this long
    counts as hung, and the worker stops claiming to be alive; ``reply_keep_s``: how long answers can be read;
    ``max_deliveries``: after so many workers were lost over a request it is answered with an error;
    ``drain_timeout_s``: how long running requests may go on when the worker is stopped, before they are given
    back.
    """

    section: ClassVar[str] = "inference"

    claim_after_s: Seconds = 10.0
    heartbeat_s: Seconds = 2.0
    stall_after_s: Seconds = 120.0
    reply_keep_s: Annotated[int, Field(ge=1)] = 600
    max_deliveries: Annotated[int, Field(ge=1)] = 5
    block_s: Seconds = 0.2
    cancel_every_s: Seconds = 0.1
    drain_timeout_s: Annotated[float, Field(ge=0)] = 10.0


@dataclass(slots=True)
class _Active:
    """A request in the engine: its entry, how many events are written, and those still to write."""

    entry: bytes
    written: int
    unwritten: list[Event] = field(default_factory=list)


class InferenceWorker:
    """Runs one engine for one stream of requests.

    ``client`` answers bytes (see ``redis_client.connect``); ``info`` tells the gateway what this worker
    serves.
    """

    def __init__(
        self,
        engine: Engine,
        client: redis.Redis,
        info: wire.WorkerInfo,
        settings: InferenceSettings | None = None,
        name: str | None = None,
    ) -> None:
        self.engine, self.info = engine, info
        self.client: Any = client  # its declared answers are text or bytes; ours are bytes
        self.settings = settings or InferenceSettings()
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._active: dict[str, _Active] = {}
        self._lock = threading.Lock()  # _active is read by the pulse thread
        self._step_began = time.monotonic()
        self._next_claim = 0.0
        self._next_cancel_check = 0.0

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop``; then let running requests finish for a while and give the others back.

        A Redis that goes away is waited for; events made meanwhile are kept and written later.
        """
        pulse_stop = threading.Event()
        pulse = threading.Thread(target=self._pulse, args=(pulse_stop,), name="inference-pulse", daemon=True)
        self._connect(stop)
        pulse.start()
        logger.info("worker %s serves %s", self.name, ", ".join(self.info.models))
        try:
            while not stop.is_set():
                self._guarded(self._turn, stop, True)
            deadline = time.monotonic() + self.settings.drain_timeout_s
            while self._active and time.monotonic() < deadline:
                self._guarded(self._turn, threading.Event(), False)
        finally:
            pulse_stop.set()
            pulse.join()
            self._leave()

    def turn(self) -> None:
        """One turn: take what fits, step, write. For callers that own the loop (tests, embedding)."""
        self._turn(True)

    def _guarded(self, call: Any, stop: threading.Event, taking: bool) -> None:
        try:
            call(taking)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._make_group()
        except (RedisError, UnavailableError) as error:
            logger.warning("Redis is not answering (%s); trying again", error)
            stop.wait(_RETRY_S)

    def _connect(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                self._make_group()
                self._announce()
                return
            except RedisError as error:
                logger.warning("waiting for Redis: %s", error)
                stop.wait(_RETRY_S)

    def _make_group(self) -> None:
        try:
            self.client.xgroup_create(wire.REQUESTS, wire.GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    @unavailable_on_loss
    def _turn(self, taking: bool) -> None:
        self._flush()
        if taking:
            self._take()
        self._drop_cancelled()
        self._step_began = time.monotonic()
        self._collect(self.engine.step())
        self._flush()

    def _take(self) -> None:
        room = self.engine.capacity - self.engine.active
        if room <= 0:
            return
        now = time.monotonic()
        if now >= self._next_claim:
            self._next_claim = now + self.settings.claim_after_s / 4
            for entry, fields in self._claimed(room):
                self._begin(entry, fields, again=True)
            room = self.engine.capacity - self.engine.active
            if room <= 0:
                return
        # An idle worker waits inside Redis; a busy one only looks.
        block = None if self.engine.active else int(self.settings.block_s * 1000)
        answer = self.client.xreadgroup(wire.GROUP, self.name, {wire.REQUESTS: ">"}, count=room, block=block)
        for _, entries in answer or ():
            for entry, fields in entries:
                self._begin(entry, fields, again=False)

    def _claimed(self, room: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        idle_ms = int(self.settings.claim_after_s * 1000)
        answer = self.client.xautoclaim(
            wire.REQUESTS, wire.GROUP, self.name, min_idle_time=idle_ms, start_id="0-0", count=room
        )
        # Entries deleted from the stream come as (id, None) from servers before 7.
        mine = {active.entry for active in self._active.values()}
        return [(entry, fields) for entry, fields in answer[1] if fields and entry not in mine]

    def _begin(self, entry: bytes, fields: dict[bytes, bytes], again: bool) -> None:
        """Own an entry and hand its request to the engine, with what was answered already."""
        request_id = fields.get(b"id", b"").decode("utf-8", "replace")
        keep_s = self.settings.reply_keep_s
        self.client.set(wire.owner_key(request_id), self.name, ex=keep_s)
        past = [
            wire.read_event(request_id, event) for _, event in self.client.xrange(wire.reply_key(request_id))
        ]
        active = _Active(entry, written=len(past))
        with self._lock:
            self._active[request_id] = active
        if past and isinstance(past[-1], (DoneEvent, ErrorEvent)):
            # The former worker died between its last event and the acknowledgement.
            self._end(request_id, active)
            return
        try:
            self._submit(entry, fields, past, again)
        except Exception as error:
            if not isinstance(error, ErnieMultiError):
                logger.exception("request %s can't be started", request_id)
            active.unwritten.append(_as_event(request_id, error))
            self.engine.cancel(request_id)

    def _submit(self, entry: bytes, fields: dict[bytes, bytes], past: list[Event], again: bool) -> None:
        request: Request = wire.read_request(fields)
        if again:
            pending = self.client.xpending_range(wire.REQUESTS, wire.GROUP, entry, entry, 1)
            deliveries = pending[0]["times_delivered"] if pending else 1
            logger.info("request %s is taken over, %d events are there", request.id, len(past))
            if deliveries > self.settings.max_deliveries:
                raise UnavailableError(f"{deliveries - 1} workers were lost while answering this request")
        if self.info.models and request.model.partition(":")[0] not in self.info.models:
            raise UnavailableError(
                f"worker serves {', '.join(self.info.models)}, not {request.model!r}", param="model"
            )
        self.engine.submit(request, past)

    def _drop_cancelled(self) -> None:
        now = time.monotonic()
        if not self._active or now < self._next_cancel_check:
            return
        self._next_cancel_check = now + self.settings.cancel_every_s
        names = list(self._active)
        for request_id, wish in zip(names, self.client.mget([wire.cancel_key(name) for name in names])):
            if wish is not None and not self._ended(request_id):
                self.engine.cancel(request_id)
                self._active[request_id].unwritten.append(DoneEvent(request_id, "cancelled"))

    def _ended(self, request_id: str) -> bool:
        unwritten = self._active[request_id].unwritten
        return bool(unwritten) and isinstance(unwritten[-1], (DoneEvent, ErrorEvent))

    def _collect(self, events: Iterable[Event]) -> None:
        for event in events:
            active = self._active.get(event.request_id)
            if active is not None and not self._ended(event.request_id):
                active.unwritten.append(event)

    def _flush(self) -> None:
        """Write all events in one round trip; end what has ended; drop what another worker owns now."""
        writing = [(name, active) for name, active in self._active.items() if active.unwritten]
        if not writing:
            return
        with self.client.pipeline(transaction=False) as pipe:
            for name, active in writing:
                arguments = wire.append_arguments(
                    self.name, self.settings.reply_keep_s, active.written, active.unwritten
                )
                pipe.eval(wire.APPEND, 2, wire.reply_key(name), wire.owner_key(name), *arguments)
            owned = pipe.execute()
        for (name, active), mine in zip(writing, owned):
            if not mine:
                logger.warning("request %s belongs to another worker now", name)
                self.engine.cancel(name)
                self._forget(name)
                continue
            last = active.unwritten[-1]
            active.written += len(active.unwritten)
            active.unwritten.clear()
            if isinstance(last, (DoneEvent, ErrorEvent)):
                self._end(name, active)

    def _end(self, request_id: str, active: _Active) -> None:
        self.client.eval(
            wire.FINISH, 2, wire.REQUESTS, wire.owner_key(request_id), self.name, wire.GROUP, active.entry
        )
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._active.pop(request_id, None)

    def _pulse(self, stop: threading.Event) -> None:
        """Heartbeats from a thread of their own, since a step may take long; a hung step ends them."""
        while not stop.wait(self.settings.heartbeat_s):
            if time.monotonic() - self._step_began > self.settings.stall_after_s:
                logger.error("a step takes longer than %g s; not alive any more", self.settings.stall_after_s)
                continue
            try:
                self._announce()
                self._keep()
            except RedisError as error:
                logger.warning("heartbeat failed: %s", error)

    def _announce(self) -> None:
        # Three missed beats, and at least the seconds in which TIME counts.
        alive_s = max(3 * self.settings.heartbeat_s, 2.0)
        self.client.eval(
            wire.ANNOUNCE,
            2,
            wire.WORKERS,
            wire.WORKERS_INFO,
            self.name,
            self.info.as_json(),
            str(int(alive_s) + 1),
        )

    def _keep(self) -> None:
        with self._lock:
            held = [(name, active.entry) for name, active in self._active.items()]
        with self.client.pipeline(transaction=False) as pipe:
            for name, entry in held:
                pipe.eval(
                    wire.KEEP,
                    2,
                    wire.REQUESTS,
                    wire.owner_key(name),
                    self.name,
                    wire.GROUP,
                    entry,
                    str(self.settings.reply_keep_s),
                )
            pipe.execute()

    def _leave(self) -> None:
        """Give unfinished requests back, so that another worker takes them at once, and sign off."""
        try:
            self._flush()
            for name, active in list(self._active.items()):
                self.engine.cancel(name)
                keys = (wire.REQUESTS, wire.owner_key(name))
                self.client.eval(wire.RELEASE, 2, *keys, self.name, wire.GROUP, active.entry)
                self._forget(name)
            self.client.zrem(wire.WORKERS, self.name)
            self.client.hdel(wire.WORKERS_INFO, self.name)
            # Deleting a consumer would delete the entries it has given back.
            if not self.client.xpending_range(wire.REQUESTS, wire.GROUP, "-", "+", 1, self.name):
                self.client.xgroup_delconsumer(wire.REQUESTS, wire.GROUP, self.name)
        except RedisError as error:
            logger.warning("worker %s could not sign off: %s", self.name, error)


def _as_event(request_id: str, error: Exception) -> ErrorEvent:
    if isinstance(error, ErnieMultiError):
        return ErrorEvent(request_id, error.message, error.type, error.param, error.status)
    return ErrorEvent(request_id, "the engine could not start this request; the worker's log has the details")
