"""Requests, replies and bounded waiting for tests of answering."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import redis

from ernie5.protocol.generation import DoneEvent, ErrorEvent, Event, GenerationParams, Request
from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan
from ernie5.services import generation_stream as wire

TEXT_SIZE = 300
INFO = wire.WorkerInfo(("mini",), TEXT_SIZE)


def text_request(request_id: str, tokens: int = 20, **params: object) -> Request:
    """A request that an echo engine answers with ``tokens`` ids."""
    codes = (np.arange(tokens, dtype=np.int32) * 7) % TEXT_SIZE
    span = TokenSpan("text", SequenceLayout(TEXT_SIZE), codes, "0" * 32)
    sequence = TokenSequence(request_id, (TokenSegment(span, "context"),))
    return Request(request_id, sequence, GenerationParams(**params), "mini")  # type: ignore[arg-type]


def submit(client: redis.Redis, request: Request) -> None:
    client.xadd(wire.REQUESTS, wire.request_fields(request))


def reply(client: redis.Redis, request_id: str) -> list[Event]:
    entries = client.xrange(wire.reply_key(request_id))
    return [wire.read_event(request_id, fields) for _, fields in entries]


def ended(client: redis.Redis, request_id: str) -> bool:
    events = reply(client, request_id)
    return bool(events) and isinstance(events[-1], (DoneEvent, ErrorEvent))


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait for a condition; fail with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)
