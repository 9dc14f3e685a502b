"""The loop by which a tokenizer replica drains its work stream.

Every problem stays with the segment that has it: a batch that raises is encoded again one by one, a segment
that can't be tokenised ends as a dead letter after ``max_attempts``, and a lost Redis is waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ernie5.protocol.errors import (
    ErnieMultiError,
    InvalidInputError,
    UnavailableError,
    UnsupportedMediaError,
)
from ernie5.protocol.modalities import ServiceName, modality_of
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSpan
from ernie5.protocol.wire import encode_span
from ernie5.services.streams import Completion, Failure, WorkEntry, WorkQueue, span_cache_key, variant_of

if TYPE_CHECKING:
    from ernie5.tokenizers.text.dropout import BpeDropout

logger = logging.getLogger(__name__)

R = TypeVar("R")

_REGISTER_EVERY_S = 1.0
_LONGEST_PAUSE_S = 2.0
_GIVE_UP_AFTER_STOP_S = 5.0


class Encoder(Protocol):
    """The part of a tokenizer that the loop uses; with dropout also the text tokenizer's arguments."""

    hash: str
    modalities: tuple[str, ...]

    def encode_segments(
        self, segments: Sequence[Segment], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]: ...


@dataclass(slots=True)
class DrainMetrics:
    """Totals of one loop.

    ``entries`` settled, of which ``encoded`` were tokenised and ``reused`` had their span already (in the
    cache or in the same batch); ``buried`` ended as dead letters; ``retried`` went back with an attempt
    counted.
    """

    batches: int = 0
    entries: int = 0
    encoded: int = 0
    reused: int = 0
    published: int = 0
    buried: int = 0
    retried: int = 0
    encode_s: float = 0.0
    lost_redis: int = 0


def drain(
    tokenizer: Encoder,
    stream: WorkQueue,
    stop_event: threading.Event,
    batch_size: int = 32,
    on_metrics: Callable[[DrainMetrics], None] | None = None,
    *,
    features: bool = True,
    latent: bool = False,
    block_ms: int = 500,
    consumer: str | None = None,
    replace_tokenizer: bool = False,
    dropout: BpeDropout | None = None,
) -> DrainMetrics:
    """Tokenise the entries of the tokenizer's service until ``stop_event``; blocks.

    Spans carry features and latent as asked. ``on_metrics`` gets a copy of the totals after each batch. On
    a stop the batch in hand is finished, or handed back where it has not begun. ``replace_tokenizer`` takes
    over a run that used another tokenizer. ``dropout`` cuts each sample's text by the sample's ordinal; it is
    part of what the run registers, so that all its workers have the same.

    Raises:
        TokenizerMismatchError: the run uses another tokenizer for one of the modalities.
        InvalidInputError: the modalities belong to several services.
    """
    return _Drain(tokenizer, stream, stop_event, features, latent, consumer, dropout).run(
        batch_size, block_ms, on_metrics, replace_tokenizer
    )


class _Drain:
    def __init__(
        self,
        tokenizer: Encoder,
        stream: WorkQueue,
        stop_event: threading.Event,
        features: bool,
        latent: bool,
        consumer: str | None,
        dropout: BpeDropout | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stream = stream
        self.stop = stop_event
        self.features = features
        self.latent = latent
        self.dropout = dropout if dropout is not None and dropout.rate > 0 else None
        plain = variant_of(features=features, latent=latent)
        drawn = variant_of(features=features, latent=latent, dropout=self.dropout)
        cut = () if self.dropout is None else self.dropout.modalities
        self.variants = {name: drawn if name in cut else plain for name in tokenizer.modalities}
        self.service = _service_of(tokenizer.modalities)
        self.consumer = consumer or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.metrics = DrainMetrics()

    def run(
        self,
        batch_size: int,
        block_ms: int,
        on_metrics: Callable[[DrainMetrics], None] | None,
        replace_tokenizer: bool,
    ) -> DrainMetrics:
        if batch_size < 1:
            raise InvalidInputError(f"batch_size {batch_size} is below 1", param="batch_size")
        pause, registered_at = 0.05, float("-inf")
        with _Lease(self.stream, self.consumer) as lease:
            while not self.stop.is_set():
                try:
                    if time.monotonic() - registered_at > _REGISTER_EVERY_S:
                        self._register(replace_tokenizer)
                        # A takeover happens once; later differences are another replica's mistake.
                        replace_tokenizer, registered_at = False, time.monotonic()
                    entries = self.stream.read_work(self.service, self.consumer, batch_size, block_ms)
                    pause = 0.05
                except UnavailableError as error:
                    self.metrics.lost_redis += 1
                    logger.warning("%s worker: %s; trying again", self.service, error)
                    self.stop.wait(pause)
                    pause, registered_at = min(2 * pause, _LONGEST_PAUSE_S), float("-inf")
                    continue
                if not entries:
                    continue
                with lease.hold(entries):
                    if self.stop.is_set():
                        self._persist(partial(self.stream.release, entries))
                        break
                    self._settle(entries)
                self.metrics.batches += 1
                if on_metrics is not None:
                    on_metrics(replace(self.metrics))
        self._leave()
        return self.metrics

    def _register(self, replace_tokenizer: bool) -> None:
        for modality in self.tokenizer.modalities:
            self.stream.register_tokenizer(
                modality, self.tokenizer.hash, self.variants[modality], replace=replace_tokenizer
            )

    def _settle(self, entries: Sequence[WorkEntry]) -> None:
        """Tokenise what is neither cached nor a repetition, and settle all entries."""
        cached: set[str] = set()
        keys = {entry.entry_id: self._cache_key(entry) for entry in entries}
        # Without an answer everything is tokenised; the same codes come out.
        with contextlib.suppress(UnavailableError):
            cached = self.stream.cache.present(keys.values())
        first: dict[str, WorkEntry] = {}
        for entry in entries:
            if keys[entry.entry_id] not in cached:
                first.setdefault(keys[entry.entry_id], entry)
        results = self._encode(list(first.values()))
        spans: dict[str, bytes] = {}
        for key, entry in first.items():
            result = results[entry.entry_id]
            if isinstance(result, bytes):
                spans[key] = result
        completions, sent = [], set(cached)
        for entry in entries:
            key = keys[entry.entry_id]
            if key in cached or key in spans:
                completions.append(Completion(entry, key, None if key in sent else spans[key]))
                self.metrics.reused += key in sent
                sent.add(key)
            else:
                self._fail(entry, results[first[key].entry_id])
        self._complete(completions, spans)
        self.metrics.entries += len(entries)

    def _complete(self, completions: list[Completion], spans: dict[str, bytes]) -> None:
        while completions:
            answer = self._persist(partial(self.stream.complete_many, completions))
            if answer is None:
                return  # stopped without Redis: the entries are claimed by others
            published, evicted = answer
            self.metrics.published += published
            completions = []
            for completion in evicted:
                # The cache has dropped it since it was looked up.
                entry, key = completion.entry, completion.cache_key
                if key not in spans:
                    result = self._encode([entry])[entry.entry_id]
                    if not isinstance(result, bytes):
                        self._fail(entry, result)
                        continue
                    spans[key] = result
                completions.append(Completion(entry, key, spans[key]))

    def _encode(self, entries: Sequence[WorkEntry]) -> dict[str, bytes | Failure]:
        """An encoded span or the failure of each entry, by its id."""
        results: dict[str, bytes | Failure] = {}
        good = []
        for entry in entries:
            if entry.segment is None:
                results[entry.entry_id] = self._permanent(entry, entry.error or "damaged entry")
            elif entry.segment.modality not in self.tokenizer.modalities:
                error = UnsupportedMediaError(
                    f"the {self.service} tokenizer does not take {entry.segment.modality!r}; it takes "
                    f"{', '.join(self.tokenizer.modalities)}"
                )
                results[entry.entry_id] = self._permanent(entry, error)
            else:
                good.append(entry)
        try:
            outcomes = self._call(good)
        except Exception as error:  # the batch as a whole went wrong: whose fault was it?
            logger.warning("%s worker: a batch of %d failed: %r", self.service, len(good), error)
            outcomes = [self._call_alone(entry) for entry in good]
        for entry, outcome in zip(good, outcomes, strict=True):
            # An error of the medium itself is tried again in place: no other replica would do better.
            attempts = entry.attempts
            while isinstance(outcome, InvalidInputError) and attempts < self.stream.max_attempts:
                attempts += 1
                outcome = self._call_alone(entry)
            if isinstance(outcome, InvalidInputError):
                results[entry.entry_id] = self._permanent(entry, outcome)
            elif isinstance(outcome, bytes):
                results[entry.entry_id] = outcome
                self.metrics.encoded += 1
            else:
                results[entry.entry_id] = Failure.of(outcome)
        return results

    def _call(self, entries: Sequence[WorkEntry]) -> list[bytes | Exception]:
        """An encoded span or an error for each entry; raises what the tokenizer raises."""
        if not entries:
            return []
        started = time.monotonic()
        try:
            segments = [entry.segment for entry in entries if entry.segment is not None]
            draws: dict[str, Any] = {}
            if self.dropout is not None:
                draws = {"dropout": self.dropout, "positions": [entry.ordinal for entry in entries]}
            spans = self.tokenizer.encode_segments(
                segments, features=self.features, latent=self.latent, **draws
            )
            if len(spans) != len(entries):
                raise RuntimeError(f"the tokenizer gave {len(spans)} results for {len(entries)} segments")
            return [encode_span(span) if isinstance(span, TokenSpan) else span for span in spans]
        finally:
            self.metrics.encode_s += time.monotonic() - started

    def _call_alone(self, entry: WorkEntry) -> bytes | Exception:
        try:
            return self._call([entry])[0]
        except Exception as error:
            return error

    def _permanent(self, entry: WorkEntry, error: BaseException | str) -> Failure:
        return Failure.of(error, attempts=max(self.stream.max_attempts, entry.attempts))

    def _fail(self, entry: WorkEntry, failure: bytes | Failure) -> None:
        assert isinstance(failure, Failure)
        final = max(failure.attempts, entry.attempts) >= self.stream.max_attempts
        buried = self._persist(lambda: self.stream.fail(entry, failure, final=final))
        if final:
            self.metrics.buried += bool(buried)
            logger.warning(
                "%s worker: sample %d segment %d is given up: %s: %s",
                self.service,
                entry.ordinal,
                entry.index,
                failure.type,
                failure.message,
            )
        else:
            self.metrics.retried += 1

    def _cache_key(self, entry: WorkEntry) -> str:
        # What the tokenizer doesn't take gets no span, so that its name doesn't matter.
        modality = entry.segment.modality if entry.segment is not None else ""
        variant = self.variants.get(modality, "-")
        return span_cache_key(entry.media_hash, self.tokenizer.hash, variant, entry.ordinal)

    def _persist(self, call: Callable[[], R]) -> R | None:
        """``call()`` until Redis answers; None when that takes too long after a stop."""
        pause, give_up = 0.05, None
        while True:
            try:
                return call()
            except UnavailableError as error:
                self.metrics.lost_redis += 1
                logger.warning("%s worker: %s; trying again", self.service, error)
            if self.stop.is_set():
                give_up = give_up or time.monotonic() + _GIVE_UP_AFTER_STOP_S
                if time.monotonic() > give_up:
                    return None
                time.sleep(pause)
            else:
                self.stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _leave(self) -> None:
        # Other workers do without this: an idle consumer costs a few bytes.
        with contextlib.suppress(UnavailableError):
            self.stream.leave(self.service, self.consumer)


class _Lease:
    """Renews the claim on the entries in hand, so that a slow batch isn't taken for a dead worker."""

    def __init__(self, stream: WorkQueue, consumer: str) -> None:
        self._stream = stream
        self._consumer = consumer
        self._held: list[WorkEntry] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="work-lease", daemon=True)

    def __enter__(self) -> _Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @contextlib.contextmanager
    def hold(self, entries: Sequence[WorkEntry]) -> Iterator[None]:
        with self._lock:
            self._held = list(entries)
        try:
            yield
        finally:
            with self._lock:
                self._held = []

    def _renew(self) -> None:
        while not self._over.wait(self._stream.claim_idle_ms / 3000):
            with self._lock, contextlib.suppress(UnavailableError):
                self._stream.refresh(self._consumer, self._held)


def _service_of(modalities: Sequence[str]) -> ServiceName:
    services = {modality_of(modality).service for modality in modalities}
    if len(services) != 1:
        raise InvalidInputError(
            f"a worker drains one service's stream, but {', '.join(modalities) or 'no modality'} belong to "
            f"{len(services)}: {', '.join(sorted(services))}",
            param="modalities",
        )
    return services.pop()
