"""Reading and settling work: what a tokenizer replica does with its stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import ResponseError

from ernie5.protocol.errors import ErnieMultiError, WireError
from ernie5.protocol.modalities import ServiceName
from ernie5.protocol.samples import Segment
from ernie5.protocol.wire import decode_segment, decode_span
from ernie5.services.cache import DEFAULT_CACHE_BYTES, span_cache_key, variant_of
from ernie5.services.redis_client import unavailable_on_loss
from ernie5.services.streams.keys import GROUP, Failure, WorkEntry
from ernie5.services.streams.run import RunStream


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one entry; ``span`` None says that the cache holds ``cache_key`` already."""

    entry: WorkEntry
    cache_key: str
    span: bytes | None


class WorkQueue(RunStream):
    """The work streams of a run as one consumer group of tokenizer replicas.

    An entry is redelivered when its worker was silent for ``claim_idle_ms``; after ``max_attempts``
    deliveries or failures its sample becomes a tombstone.
    """

    def __init__(
        self,
        client: redis.Redis[bytes],
        run: str,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        max_attempts: int = 3,
        claim_idle_ms: int = 30_000,
    ) -> None:
        super().__init__(client, run, cache_bytes=cache_bytes)
        self.max_attempts = max_attempts
        self.claim_idle_ms = claim_idle_ms
        self._claim_cursor: dict[str, bytes] = {}
        self._next_claim: dict[str, float] = {}

    @unavailable_on_loss
    def read_work(
        self, service: ServiceName, consumer: str, count: int = 32, block_ms: int = 500
    ) -> list[WorkEntry]:
        """Up to ``count`` entries for ``consumer``; empty after ``block_ms`` without any (0: don't wait).

        An entry that another worker left behind comes alone: should it be the one that kills workers, it
        takes no neighbour along, and each try counts for it only.
        """
        if time.monotonic() >= self._next_claim.get(service, 0.0):
            entry = self._claim_one(service, consumer)
            if entry is not None:
                return [entry]
            self._next_claim[service] = time.monotonic() + self.claim_idle_ms / 4000
        stream = self.keys.work(service)
        answer = self._with_group(
            stream,
            lambda: self.client.xreadgroup(
                GROUP, consumer, {stream: ">"}, count=count, block=block_ms if block_ms > 0 else None
            ),
        )
        if not answer:
            return []
        return [_entry(service, entry_id, fields, deliveries=1) for entry_id, fields in answer[0][1]]

    @unavailable_on_loss
    def waiting(self, service: ServiceName) -> int:
        """Entries of a work stream that are not settled, in workers' hands or not: the stream's lag."""
        return int(self.client.xlen(self.keys.work(service)))

    def _claim_one(self, service: ServiceName, consumer: str) -> WorkEntry | None:
        """One entry whose worker has been silent for too long; buries those that were tried often enough."""
        stream = self.keys.work(service)
        while True:
            start = self._claim_cursor.get(service, b"0-0")
            cursor, claimed, *_ = self._with_group(
                stream,
                lambda start=start: self.client.xautoclaim(
                    stream, GROUP, consumer, self.claim_idle_ms, start_id=start, count=1
                ),
            )
            self._claim_cursor[service] = cursor
            for entry_id, fields in claimed:
                known = self.client.xpending_range(stream, GROUP, min=entry_id, max=entry_id, count=1)
                entry = _entry(service, entry_id, fields, known[0]["times_delivered"] if known else 2)
                if entry.attempts <= self.max_attempts:
                    return entry
                self.fail(
                    entry,
                    Failure(
                        "worker_lost",
                        f"its worker was lost or silent for {self.claim_idle_ms} ms in each of "
                        f"{entry.attempts - 1} attempts",
                    ),
                )
            if cursor == b"0-0":
                return None

    def _with_group(self, stream: str, read: Any) -> Any:
        """``read()``; where the group or the stream has vanished (or never was), they are made first.

        A new group starts at the beginning: settled entries are deleted, so whatever the stream holds is
        unsettled.
        """
        try:
            return read()
        except ResponseError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
        self._run_script("group", stream.rpartition(":")[2], GROUP)
        return read()

    # -- settling ----------------------------------------------------------------------------------

    def complete(self, entry: WorkEntry, span: bytes) -> bool:
        """Store an encoded span for its entry; True when that published the sample.

        Its tokenizer's hash, and whether it carries features and latent, name it in the cache. Not for
        text cut with dropout, which the span doesn't tell: :meth:`complete_many` takes its name.
        """
        decoded = decode_span(span)
        variant = variant_of(features=bool(decoded.features), latent=decoded.latent is not None)
        cache_key = span_cache_key(entry.media_hash, decoded.tokenizer, variant, entry.ordinal)
        published, _ = self.complete_many([Completion(entry, cache_key, span)])
        return published == 1

    def complete_many(self, completions: Sequence[Completion]) -> tuple[int, list[Completion]]:
        """Settle entries of one service in one atomic round trip.

        Spans are stored, segments filled, whole samples published exactly once, entries removed. Completing
        what is settled already changes nothing.

        Returns:
            the number of samples published, and those completions whose span was promised to be in the
            cache and has been evicted meanwhile; they stay with the worker, to be completed with a span.
        """
        if not completions:
            return 0, []
        services = {completion.entry.service for completion in completions}
        if len(services) != 1:
            raise ValueError(f"completions of one call must be of one service, got {sorted(services)}")
        arguments: list[bytes | str | int] = [services.pop(), GROUP, self.cache_bytes, len(completions)]
        for completion in completions:
            entry = completion.entry
            arguments += [entry.entry_id, entry.ordinal, entry.index, entry.media_hash]
            arguments += [completion.cache_key, completion.span or b""]
        published, *absent = self._run_script("complete", *arguments)
        return int(published), [completions[int(place)] for place in absent]

    def fail(
        self, entry: WorkEntry, error: BaseException | Failure | str, *, final: bool | None = None
    ) -> bool:
        """An attempt has failed; True when its sample was buried.

        Below ``max_attempts`` the entry goes to the end of the stream with its attempts counted; then, or
        at once with ``final``, the sample becomes a tombstone and a dead letter with the error.
        """
        failure = error if isinstance(error, Failure) else Failure.of(error)
        failure = Failure(
            failure.type,
            failure.message,
            segment=entry.index,
            modality=entry.segment.modality if entry.segment else None,
            attempts=max(entry.attempts, failure.attempts),
            media_hash=entry.media_hash,
        )
        if final is None:
            final = entry.attempts >= self.max_attempts
        return self._settle(entry, "final" if final else "retry", failure.as_json()) == b"buried"

    def release(self, entries: Sequence[WorkEntry]) -> None:
        """Hand entries back untouched; no attempt is counted."""
        for entry in entries:
            self._settle(entry, "release", "")

    def _settle(self, entry: WorkEntry, mode: str, failure: str) -> bytes:
        return bytes(
            self._run_script(
                "fail",
                entry.service,
                GROUP,
                mode,
                entry.entry_id,
                entry.ordinal,
                entry.index,
                entry.media_hash,
                failure,
                entry.attempts - 1 if mode == "release" else entry.attempts,
            )
        )

    @unavailable_on_loss
    def refresh(self, consumer: str, entries: Sequence[WorkEntry]) -> None:
        """Say that ``consumer`` is still at work on these, so that nobody claims them."""
        if not entries:
            return
        try:
            self.client.xclaim(
                self.keys.work(entries[0].service),
                GROUP,
                consumer,
                min_idle_time=0,
                message_ids=[entry.entry_id for entry in entries],
                justid=True,
            )
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise

    @unavailable_on_loss
    def leave(self, service: ServiceName, consumer: str) -> None:
        """Remove a consumer that holds nothing any more."""
        stream = self.keys.work(service)
        try:
            if not self.client.xpending_range(stream, GROUP, "-", "+", 1, consumername=consumer):
                self.client.xgroup_delconsumer(stream, GROUP, consumer)
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise


def _entry(service: ServiceName, entry_id: bytes, fields: dict[bytes, bytes], deliveries: int) -> WorkEntry:
    segment: Segment | None = None
    problem: ErnieMultiError | None = None
    try:
        segment = decode_segment(fields[b"b"])
    except WireError as error:
        problem = error
    return WorkEntry(
        service=service,
        entry_id=entry_id.decode(),
        ordinal=int(fields[b"o"]),
        index=int(fields[b"s"]),
        media_hash=fields[b"m"].decode(),
        attempts=int(fields[b"a"]) + deliveries,
        segment=segment,
        error=problem,
    )
