"""Adding samples: what ingest does with the streams."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.modalities import ServiceName, modality_of
from ernie5.protocol.samples import Sample, Segment
from ernie5.protocol.wire import encode_segment
from ernie5.services.cache import span_cache_key
from ernie5.services.redis_client import unavailable_on_loss
from ernie5.services.streams.head import bare_head, write_head
from ernie5.services.streams.keys import Failure
from ernie5.services.streams.run import RunStream

_TOKENIZERS_FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class AddedSamples:
    """What one call has done.

    ``cursor`` is set, and nothing else was done, when Redis's cursor was not the expected one: another
    ingest is at work, or Redis has lost its latest writes (-1: all of them).
    """

    new: int = 0
    published: int = 0
    cached_segments: int = 0
    cursor: int | None = None


@dataclass(frozen=True, slots=True)
class IngestView:
    """What ingest needs to know before it adds more; all ordinals; None where Redis holds nothing."""

    cursor: int | None
    consumed: int | None
    covered: int | None
    again_from: int | None
    untrimmed: int
    checkpoint_asked: bool
    corpus_known: bool
    used_memory: int
    max_memory: int

    @property
    def lag(self) -> int:
        """Samples added and not yet consumed."""
        return max((self.cursor or 0) - (self.consumed or 0), 0)


class Producer(RunStream):
    """Adds samples under their ordinals (``epoch * length + position``)."""

    _known_tokenizers: dict[str, str]
    _tokenizers_read_at: float = 0.0

    def add_sample(self, epoch: int, position: int, sample: Sample | Failure, *, length: int) -> AddedSamples:
        """Add one sample at its place; see :meth:`add_samples`."""
        if not 0 <= position < length or epoch < 0:
            raise InvalidInputError(
                f"(epoch {epoch}, position {position}) lies outside epochs of {length} samples"
            )
        return self.add_samples([(epoch * length + position, sample)])

    @unavailable_on_loss
    def add_samples(
        self,
        samples: Sequence[tuple[int, Sample | Failure]],
        *,
        expected_cursor: int | None = None,
        new_cursor: int | None = None,
    ) -> AddedSamples:
        """Add samples atomically; each is ``(ordinal, sample)``, or a ``Failure`` where it could not be read.

        Segments whose spans are cached are referred to; the others go to the work streams. A sample with
        nothing missing is published at once; a failure becomes a tombstone and a dead letter, and so does a
        sample that can't be written (unknown modality, unread reference, lone surrogate, unserialisable
        metadata). Adding a sample again changes nothing, except that it is made anew where Redis has lost a
        part of it.

        With ``expected_cursor`` (-1: none) nothing is done unless ingest's cursor in Redis has that value;
        ``new_cursor`` is then its new value (default: the highest ordinal + 1, never lower than it was).

        Raises:
            StreamFullError: Redis is at its memory limit; nothing was done.
        """
        tokenizers = self._tokenizers()
        prepared = [_prepare_sample(ordinal, sample, tokenizers) for ordinal, sample in samples]
        cached = self.cache.present([segment.cache_key for sample in prepared for segment in sample.segments])
        while True:
            arguments: list[bytes | str | int] = [
                "" if expected_cursor is None else expected_cursor,
                "" if new_cursor is None else new_cursor,
                len(samples),
            ]
            asked: list[str] = []
            for sample in prepared:
                sample.encode_all_but(cached)
                arguments += [sample.ordinal, sample.head, sample.failure, len(sample.segments)]
                for segment in sample.segments:
                    payload = b"" if segment.cache_key in cached else segment.payload
                    arguments += [segment.service, segment.media_hash, segment.cache_key, payload]
                    asked.append(segment.cache_key)
            answer = self._run_script("add", *arguments)
            if answer[0] == b"payload":
                cached -= {asked[int(place)] for place in answer[1:]}  # evicted in between
            elif answer[0] == b"moved":
                return AddedSamples(cursor=int(answer[1]))
            else:
                return AddedSamples(*(int(value) for value in answer[1:]))

    def _tokenizers(self) -> dict[str, str]:
        """The run's tokenizers, asked for again every second: they may come up, or vanish, at any time."""
        now = time.monotonic()
        if not self._tokenizers_read_at or now - self._tokenizers_read_at > _TOKENIZERS_FRESH_S:
            self._known_tokenizers = self.tokenizers()
            self._tokenizers_read_at = now
        return self._known_tokenizers

    # -- ingest's cursor and the trainer's wishes --------------------------------------------------

    @unavailable_on_loss
    def view(self) -> IngestView:
        """Cursor, position and wishes in one round trip."""
        # No transaction: a full server refuses those whatever they do.
        pipe = self.client.pipeline(transaction=False)
        pipe.hget(self.keys.named("ingest"), "cursor")
        pipe.hmget(self.keys.position, "consumed", "covered")
        pipe.hmget(self.keys.named("control"), "again_from", "checkpoint")
        pipe.zcard(self.keys.named("open"))
        pipe.exists(self.keys.named("corpus"))
        pipe.info("memory")
        cursor, (consumed, covered), (again, checkpoint), untrimmed, corpus, memory = pipe.execute()

        def number(value: bytes | None) -> int | None:
            return None if value is None else int(value)

        return IngestView(
            cursor=number(cursor),
            consumed=number(consumed),
            covered=number(covered),
            again_from=number(again),
            untrimmed=untrimmed,
            checkpoint_asked=checkpoint is not None,
            corpus_known=bool(corpus),
            used_memory=int(memory["used_memory"]),
            max_memory=int(memory.get("maxmemory", 0)),
        )

    def open_cursor(self, start: int) -> int:
        """Ingest's cursor, set to ``start`` where there is none."""
        return int(self._run_script("cursor", "open", start))

    def go_again(self) -> int:
        """Take the trainer's wish: the cursor goes back to the ordinal that it misses; the new cursor."""
        return int(self._run_script("cursor", "again", ""))

    def skip_to(self, ordinal: int) -> int:
        """Move the cursor forward to ``ordinal``; the new cursor."""
        return int(self._run_script("cursor", "skip", ordinal))

    def ask_checkpoint(self) -> None:
        """Ask the trainer for a checkpoint, so that entries can be trimmed."""
        self._run_script("cursor", "checkpoint", "")

    def shrink_cache(self, limit: int) -> tuple[int, int]:
        """Evict down to ``limit`` bytes as far as possible: (spans evicted, bytes left)."""
        evicted, left = self._run_script("evict", limit)
        return int(evicted), int(left)


@dataclass(slots=True)
class _PreparedSegment:
    """A segment with its identity; ``payload`` is its wire message, made when it is needed."""

    segment: Segment
    service: ServiceName
    media_hash: str
    cache_key: str
    payload: bytes = b""


@dataclass(slots=True)
class _PreparedSample:
    """The arguments of one sample; with a ``failure`` (JSON) it has no segments."""

    ordinal: int
    head: bytes
    failure: str = ""
    segments: list[_PreparedSegment] = field(default_factory=list)

    def encode_all_but(self, cached: set[str]) -> None:
        """Make the payloads that are missing; what the wire can't carry makes the sample a failure."""
        for index, segment in enumerate(self.segments):
            if segment.payload or segment.cache_key in cached:
                continue
            try:
                segment.payload = encode_segment(segment.segment)
            except InvalidInputError as error:
                failure = Failure.of(
                    error, segment=index, modality=segment.segment.modality, media_hash=segment.media_hash
                )
                self.failure, self.segments = failure.as_json(), []
                return


def _prepare_sample(ordinal: int, sample: Sample | Failure, tokenizers: Mapping[str, str]) -> _PreparedSample:
    if isinstance(sample, Failure):
        return _PreparedSample(ordinal, bare_head("", {}), sample.as_json())
    segments = []
    for index, segment in enumerate(sample.segments):
        try:
            service = modality_of(segment.modality).service
            media_hash = segment.media_hash
        except ValueError as error:
            broken_text = isinstance(error, UnicodeError)
            failure = Failure(
                "invalid_media" if broken_text else "invalid_input",
                f"text is not valid Unicode: {error}" if broken_text else str(error),
                segment=index,
                modality=segment.modality,
            )
            return _PreparedSample(ordinal, bare_head("", sample.metadata), failure.as_json())
        tokenizer, _, variant = tokenizers.get(segment.modality, "").partition(":")
        cache_key = span_cache_key(media_hash, tokenizer, variant, ordinal) if tokenizer else ""
        segments.append(_PreparedSegment(segment, service, media_hash, cache_key))
    try:
        head = write_head(sample, sample.sample_id)
    except InvalidInputError as error:
        return _PreparedSample(ordinal, bare_head("", {}), Failure.of(error).as_json())
    return _PreparedSample(ordinal, head, "", segments)
