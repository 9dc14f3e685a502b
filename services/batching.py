"""Joins the segments of concurrent requests into batches for one tokenizing thread.

The event loop stays free for health checks and reading bodies while the thread computes, and whatever
arrives meanwhile forms the next batch: no waiting time is added to a lone request. Tokenizers
guarantee that a segment's codes don't depend on its neighbours, so batches change nothing but speed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ernie5.protocol.errors import ErnieMultiError, UnavailableError
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSpan
from ernie5.services.limited_tokenizer import payload_bytes
from ernie5.tokenizers.base import Medium, Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """Items of one request; jobs of equal ``key`` may share a batch."""

    key: tuple[Any, ...]
    items: list[Any]
    bytes: int
    future: Future[list[Any]] = field(default_factory=Future)


class Batcher:
    """Runs a tokenizer in a thread of its own, several requests at a time.

    ``max_items`` bounds a batch, ``max_queued`` the items and ``max_queued_bytes`` the media that wait;
    beyond them requests are refused with ``UnavailableError`` (503) rather than piled up. A request that
    finds nothing waiting is always taken.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_items: int, max_queued: int, max_queued_bytes: int = 256 << 20
    ) -> None:
        self._tokenizer = tokenizer
        self._max_items, self._max_queued, self._max_bytes = max_items, max_queued, max_queued_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = self._queued_bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tokenizer-batches", daemon=True)
        self._thread.start()

    async def encode(
        self, segments: Sequence[Segment], *, features: bool = False, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        """As :meth:`Tokenizer.encode_segments`, from the event loop."""
        size = sum(payload_bytes(segment) for segment in segments)
        return await self._submit(_Job(("encode", features, latent), list(segments), size))

    async def decode(
        self, spans: Sequence[TokenSpan], *, content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        """As :meth:`Tokenizer.decode_spans`, from the event loop."""
        size = sum(span.codes.nbytes for span in spans)
        return await self._submit(_Job(("decode", content_type), list(spans), size))

    def close(self) -> None:
        """Finish what is queued, refuse the rest and wait for the thread."""
        with self._lock:
            self._closed = True
        self._jobs.put(None)
        self._thread.join()

    async def _submit(self, job: _Job) -> list[Any]:
        count = len(job.items)
        with self._lock:
            if self._closed:
                raise UnavailableError("the service is shutting down")
            if self._queued + count > max(self._max_queued, count):
                raise UnavailableError(
                    f"{self._queued} items wait already (limit {self._max_queued}); try again shortly"
                )
            if self._queued_bytes + job.bytes > max(self._max_bytes, job.bytes):
                raise UnavailableError(
                    f"{self._queued_bytes} bytes of media wait already (limit {self._max_bytes}); try again "
                    "shortly, or raise ERNIE_MULTI_SERVICE_MAX_QUEUED_BYTES"
                )
            self._queued += count
            self._queued_bytes += job.bytes
            self._jobs.put(job)
        return await asyncio.wrap_future(job.future)

    def _run(self) -> None:
        held: _Job | None = None
        open_ = True
        while open_ or held is not None:
            job = held if held is not None else self._jobs.get()
            held = None
            if job is None:
                break
            batch = [job]
            size = len(job.items)
            while open_ and size < self._max_items:
                try:
                    following = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    open_ = False
                elif following.key == job.key and size + len(following.items) <= self._max_items:
                    batch.append(following)
                    size += len(following.items)
                else:
                    held = following
                    break
            self._compute(batch)

    def _compute(self, batch: list[_Job]) -> None:
        with self._lock:
            self._queued -= sum(len(job.items) for job in batch)
            self._queued_bytes -= sum(job.bytes for job in batch)
        # A job whose client has gone is skipped.
        live = [job for job in batch if job.future.set_running_or_notify_cancel()]
        if not live:
            return
        items = [item for job in live for item in job.items]
        kind, *options = live[0].key
        try:
            if kind == "encode":
                results: list[Any] = list(
                    self._tokenizer.encode_segments(items, features=options[0], latent=options[1])
                )
            else:
                results = list(self._tokenizer.decode_spans(items, content_type=options[0]))
            if len(results) != len(items):
                raise RuntimeError(f"tokenizer gave {len(results)} results for {len(items)} items")
        except Exception as error:
            if not isinstance(error, ErnieMultiError):
                logger.exception("tokenizing a batch of %d items failed", len(items))
            for job in live:
                job.future.set_exception(error)
            return
        start = 0
        for job in live:
            job.future.set_result(results[start : start + len(job.items)])
            start += len(job.items)
