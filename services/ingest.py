"""Ingest: walks a corpus in its order and adds the samples to the streams of a run.

The order is a pure function of (seed, epoch, position), and the cursor lies in Redis beside the data: an
ingest that starts, or finds that Redis has lost something, goes on from what Redis and the trainer say,
never from its own memory alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ernie5.corpora.order import position_to_index
from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError, UnavailableError
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.samples import Sample, Segment
from ernie5.services.redis_client import StreamFullError
from ernie5.services.streams import Failure, IngestView, Position, Producer

logger = logging.getLogger(__name__)

MAX_MEDIUM_BYTES = 64 << 20
_READ_ATTEMPTS = 3
_POLL_S = 0.02
_LONGEST_PAUSE_S = 2.0
# A trainer publishes its position every second, so after a loss it is back by then.
_POSITION_GRACE_S = 3.0
# Below this share of high_water the other marks don't hold ingest up: the trainer must be able to reach its
# next checkpoint, however few samples Redis should hold.
_FLOOR = 8


class Corpus(Protocol):
    """Samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(slots=True)
class IngestMetrics:
    """Totals of one walk: samples ``added`` (known ones not counted), of which ``cached`` were published at
    once; ``unreadable`` ones; ``waits`` for the trainer or for memory; ``rewinds`` after a loss."""

    added: int = 0
    cached: int = 0
    unreadable: int = 0
    waits: int = 0
    rewinds: int = 0
    lost_redis: int = 0


class Ingest:
    """Walks ``corpus`` for a run.

    ``epochs`` bounds the walk (default: endless). ``high_water`` bounds the samples added and not yet
    consumed; above ``entry_mark`` samples that no checkpoint covers the trainer is asked for one.
    ``memory_share`` of Redis's ``maxmemory`` (``memory_limit`` bytes where it has none) bounds everything.
    ``root`` is the folder that references lie in. ``order`` maps (seed, epoch, position, length) to an
    index of the corpus.
    """

    def __init__(
        self,
        stream: Producer,
        corpus: Corpus,
        *,
        seed: int = 0,
        name: str = "",
        epochs: int | None = None,
        start: tuple[int, int] = (0, 0),
        root: Path | None = None,
        high_water: int = 512,
        entry_mark: int = 4096,
        batch_size: int = 64,
        batch_bytes: int = 4 << 20,
        memory_share: float = 0.8,
        memory_limit: int = 1 << 30,
        order: Callable[[int, int, int, int], int] = position_to_index,
        on_metrics: Callable[[IngestMetrics], None] | None = None,
    ) -> None:
        if high_water < 1 or batch_size < 1 or entry_mark <= high_water:
            raise InvalidInputError(
                f"high_water {high_water} and batch_size {batch_size} must be at least 1, "
                f"entry_mark {entry_mark} above high_water"
            )
        if epochs is not None and epochs < 1:
            raise InvalidInputError(f"epochs {epochs} is below 1", param="epochs")
        if not len(corpus):
            raise InvalidInputError("the corpus is empty", param="corpus")
        self.stream = stream
        self.corpus = corpus
        self.length = len(corpus)
        self.seed = seed
        self.name = name
        self.end = None if epochs is None else epochs * self.length
        self.start = Position(*start).ordinal(self.length)
        self.root = root
        self.high_water = high_water
        self.entry_mark = entry_mark
        self.batch_size = batch_size
        self.batch_bytes = batch_bytes
        self.memory_share = memory_share
        self.memory_limit = memory_limit
        self.order = order
        self.on_metrics = on_metrics
        self.metrics = IngestMetrics()
        self._last_consumed: int | None = None
        self._position_gone_at: float | None = None

    def run(self, stop_event: threading.Event) -> IngestMetrics:
        """Walk until ``stop_event``, or until all epochs are added and consumed; blocks.

        Raises:
            InvalidInputError: the run walks another corpus or seed.
        """
        pause = _POLL_S
        registered = False
        while not stop_event.is_set():
            try:
                if not registered:
                    self.stream.register_corpus(self.length, self.seed, self.name)
                    registered = True
                view = self.stream.view()
                registered = view.corpus_known
                if registered and self._finished(view):
                    break
                worked = registered and self._step(view)
                pause = _POLL_S
                if not worked:
                    stop_event.wait(pause)
            except UnavailableError as error:
                self.metrics.lost_redis += 1
                logger.warning("ingest: %s; trying again", error)
                stop_event.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self.metrics

    def _finished(self, view: IngestView) -> bool:
        return self.end is not None and view.consumed is not None and view.consumed >= self.end

    def _step(self, view: IngestView) -> bool:
        """Do what the view calls for; False when there is nothing to do but wait."""
        if view.consumed is not None:
            self._last_consumed, self._position_gone_at = view.consumed, None
        if view.again_from is not None:
            cursor = self.stream.go_again()
            self.metrics.rewinds += 1
            logger.warning("ingest: going again from sample %d", cursor)
            return True
        if view.cursor is None:
            return self._open(view)
        if view.consumed is not None and view.consumed > view.cursor:
            self.stream.skip_to(view.consumed)
            return True
        room = self._room(view)
        if room <= 0:
            self.metrics.waits += 1
            return False
        return self._add(view.cursor, room)

    def _open(self, view: IngestView) -> bool:
        """Redis knows no cursor: a new run, or everything is lost. The trainer's word goes first."""
        start = view.consumed
        if start is None and self._last_consumed is not None:
            now = time.monotonic()
            self._position_gone_at = self._position_gone_at or now
            if now - self._position_gone_at < _POSITION_GRACE_S:
                return False
            start = self._last_consumed
        self.stream.open_cursor(self.start if start is None else start)
        return True

    def _room(self, view: IngestView) -> int:
        """How many samples may be added now."""
        room = self.high_water - view.lag
        if self.end is not None and view.cursor is not None:
            room = min(room, self.end - view.cursor)
        if room <= 0:
            return 0
        floor = max(self.high_water // _FLOOR, 1)
        limit = int(self.memory_share * view.max_memory) if view.max_memory else self.memory_limit
        crowded = view.untrimmed >= self.entry_mark
        if view.used_memory >= limit:
            self._make_space()
            crowded = True
        if not crowded:
            return room
        if not view.checkpoint_asked:
            self.stream.ask_checkpoint()
        return min(room, floor - view.lag)

    def _make_space(self) -> None:
        """Drop the spans that were used least recently, about a quarter of them."""
        _, left = self.stream.shrink_cache(1 << 62)
        evicted, left = self.stream.shrink_cache(left * 3 // 4)
        if evicted:
            logger.info("ingest: Redis is nearly full; %d cached spans dropped, %d bytes left", evicted, left)

    def _add(self, cursor: int, room: int) -> bool:
        batch: list[tuple[int, Sample | Failure]] = []
        size = 0
        for ordinal in range(cursor, cursor + min(room, self.batch_size)):
            sample = self._read(ordinal)
            batch.append((ordinal, sample))
            if isinstance(sample, Failure):
                self.metrics.unreadable += 1
                logger.warning("ingest: sample %d can't be read: %s", ordinal, sample.message)
            else:
                size += sum(len(segment.data or segment.text or "") for segment in sample.segments)
            if size >= self.batch_bytes:
                break
        try:
            added = self.stream.add_samples(batch, expected_cursor=cursor, new_cursor=cursor + len(batch))
        except StreamFullError:
            self._make_space()
            self.stream.ask_checkpoint()
            self.metrics.waits += 1
            return False
        if added.cursor is None:
            self.metrics.added += added.new
            self.metrics.cached += added.published
            if self.on_metrics is not None:
                self.on_metrics(replace(self.metrics))
        return True

    def _read(self, ordinal: int) -> Sample | Failure:
        """The sample at an ordinal; tried again, as a file system may stumble."""
        position = Position.of(ordinal, self.length)
        index = self.order(self.seed, position.epoch, position.position, self.length)
        problem: Exception | None = None
        for _ in range(_READ_ATTEMPTS):
            try:
                return resolve_references(self.corpus[index], self.root)
            except Exception as error:
                problem = error
        failure = Failure.of(problem or "unreadable", attempts=_READ_ATTEMPTS)
        return replace(failure, message=f"corpus item {index}: {failure.message}"[:2000])


def resolve_references(sample: Sample, root: Path | None) -> Sample:
    """The sample with the files that its segments refer to read in.

    A reference is a relative path inside ``root``. Tokenizer services run anywhere, so media travel, not
    paths.

    Raises:
        InvalidInputError: a reference outside ``root``, or none is given.
        MediaTooLargeError: a file above :data:`MAX_MEDIUM_BYTES`.
        InvalidMediaError: a text file that is not UTF-8.
        OSError: a file that can't be read.
    """
    if all(segment.reference is None for segment in sample.segments):
        return sample
    segments = tuple(
        segment if segment.reference is None else _read_reference(segment, segment.reference, root)
        for segment in sample.segments
    )
    return Sample(segments=segments, metadata=sample.metadata)


def _read_reference(segment: Segment, reference: str, root: Path | None) -> Segment:
    if root is None:
        raise InvalidInputError(
            f"reference {reference!r} can't be read: the corpus names no folder", param="root"
        )
    base = root.resolve()
    path = (base / reference).resolve()
    if Path(reference).is_absolute() or not path.is_relative_to(base):
        raise InvalidInputError(f"reference {reference!r} leads out of the corpus", param="reference")
    size = path.stat().st_size
    if size > MAX_MEDIUM_BYTES:
        raise MediaTooLargeError(
            f"{reference} has {size} bytes, above the limit {MAX_MEDIUM_BYTES}", param="reference"
        )
    data = path.read_bytes()
    known = MODALITIES.get(segment.modality)
    fields = segment.model_dump(exclude={"reference", "text", "data"})
    if known is not None and known.service == "text":
        try:
            return Segment(**fields, text=data.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidMediaError(f"{reference} is not UTF-8: {error}", param="reference") from None
    return Segment(**fields, data=data)
