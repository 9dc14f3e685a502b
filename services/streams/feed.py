"""Ordered delivery to the trainer.

A thread reads ``{run}:tokens`` as entries arrive, in any order, keeps those that are still wanted, fetches
and decodes the spans of the next few in order, publishes how far the trainer has come, trims what a
checkpoint covers, and asks ingest to go again where something is missing. The trainer's own thread only
takes from a queue, so back-pressure needs no help from it.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.protocol.tokens import TokenSegment, TokenSequence, TokenSpan
from ernie5.services.cache import SpanCache
from ernie5.services.redis_client import unavailable_on_loss
from ernie5.services.streams.head import read_head
from ernie5.services.streams.keys import Failure, Position, Tombstone
from ernie5.services.streams.run import RunStream

logger = logging.getLogger(__name__)

_TRIM_AT_ONCE = 500
_READ_AT_ONCE = 500
_PUBLISH_S = 0.1
_HEARTBEAT_S = 1.0
_POLL_MS = 50

Item = tuple[Position, TokenSequence | Tombstone]


class TokenFeed:
    """Yields ``(position, TokenSequence | Tombstone)`` in dense (epoch, position) order from any start.

    Use it as a context manager and iterate. ``length`` is the epoch's (default: what ingest has registered;
    the feed waits for it). ``prefetch`` samples are decoded ahead. ``on_checkpoint_asked`` is called once,
    from the feed's thread, each time producers ask for a checkpoint; :attr:`checkpoint_asked` says the
    same.

    Handing out a sample counts it as consumed. :meth:`commit` says that a checkpoint covers all samples
    before a position, and what it covers is trimmed. ``end`` (exclusive) ends the iteration.

    Raises, from the iterator:
        UnavailableError: nothing came for ``timeout_s`` (default: wait for ever).
    """

    def __init__(
        self,
        stream: RunStream,
        start: Position | tuple[int, int] = (0, 0),
        *,
        length: int | None = None,
        end: Position | tuple[int, int] | None = None,
        prefetch: int = 64,
        probe_s: float = 0.5,
        timeout_s: float | None = None,
        decoded_cache_bytes: int = 64 << 20,
        on_checkpoint_asked: Callable[[], None] | None = None,
    ) -> None:
        if prefetch < 1:
            raise InvalidInputError(f"prefetch {prefetch} is below 1", param="prefetch")
        self.stream = stream
        self.trainer = uuid.uuid4().hex
        self._start = start if isinstance(start, Position) else Position(*start)
        self._end = end if isinstance(end, Position) or end is None else Position(*end)
        self._length = length
        self._prefetch = prefetch
        self._probe_s = probe_s
        self._timeout_s = timeout_s
        self._on_checkpoint_asked = on_checkpoint_asked
        self._spans = SpanCache(stream.client, decoded_cache_bytes)

        self._changed = threading.Condition()
        self._ready: dict[int, TokenSequence | Tombstone] = {}  # decoded, in order from _consumed on
        self._consumed = self._covered = -1  # ordinals; known once the length is
        self._end_ordinal: int | None = None
        self._closing = False
        self._error: BaseException | None = None
        self._checkpoint_asked = False

        # The thread's own state.
        self._entries: dict[int, dict[bytes, bytes]] = {}  # read, not decoded yet
        self._decoded_to = -1
        self._last_id = b"0-0"
        self._reported: tuple[int, int] = (-1, -1)
        self._reported_at = 0.0
        self._untrimmed = True
        self._missing_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="token-feed", daemon=True)

    # -- the trainer's side ------------------------------------------------------------------------

    def __enter__(self) -> TokenFeed:
        if self._length is not None:
            self._open(self._length)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread; the position it has published last stays."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def __iter__(self) -> Iterator[Item]:
        while (item := self.next()) is not None:
            yield item

    def next(self) -> Item | None:
        """The next sample, waiting for it; None at the end or after :meth:`close`."""
        with self._changed:
            deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
            while True:
                if self._error is not None:
                    raise self._error
                if self._closing or (self._end_ordinal is not None and self._consumed >= self._end_ordinal):
                    return None
                value = self._ready.pop(self._consumed, None)
                if value is not None:
                    break
                wait = None if deadline is None else deadline - time.monotonic()
                if wait is not None and wait <= 0:
                    raise UnavailableError(
                        f"no sample came for {self._timeout_s} s; waiting for ordinal {self._consumed} of "
                        f"run {self.stream.keys.run!r}. Are ingest and the tokenizer services up?"
                    )
                self._changed.wait(wait)
            position = Position.of(self._consumed, self._known_length())
            self._consumed += 1
            self._changed.notify_all()
            return position, value

    def commit(self, position: Position | tuple[int, int]) -> None:
        """A checkpoint covers all samples before ``position``. Returns at once; Redis is told as soon as it
        answers.

        Raises:
            InvalidInputError: that sample has not been handed out yet.
        """
        wanted = position if isinstance(position, Position) else Position(*position)
        with self._changed:
            ordinal = wanted.ordinal(self._known_length())
            if ordinal > self._consumed:
                raise InvalidInputError(
                    f"a checkpoint can't cover {wanted}: only samples before "
                    f"{Position.of(self._consumed, self._known_length())} were handed out"
                )
            self._covered = max(self._covered, ordinal)
            self._checkpoint_asked = False
            self._changed.notify_all()

    @property
    def position(self) -> Position:
        """The next sample to be handed out."""
        with self._changed:
            if self._length is None:
                return self._start
            return Position.of(self._consumed, self._length)

    @property
    def checkpoint_asked(self) -> bool:
        """Whether producers wait for a checkpoint."""
        with self._changed:
            return self._checkpoint_asked

    def _known_length(self) -> int:
        if self._length is None:
            raise InvalidInputError("no sample has been handed out yet")
        return self._length

    def _open(self, length: int) -> None:
        with self._changed:
            self._length = length
            self._consumed = self._covered = self._decoded_to = self._start.ordinal(length)
            self._end_ordinal = None if self._end is None else self._end.epoch * length + self._end.position
            self._changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        pause = 0.05
        while not self._closing:
            try:
                if self._length is None:
                    known = self.stream.corpus()
                    if known is None:
                        self._sleep(0.1)
                        continue
                    self._open(int(known["length"]))
                self._report()
                self._read()
                self._decode()
                self._probe()
                pause = 0.05
            except UnavailableError as error:
                logger.warning("token feed: %s; trying again", error)
                self._sleep(pause)
                pause = min(2 * pause, 2.0)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
        try:
            self._report(force=True)
        except Exception as error:
            logger.warning("token feed: the last position was not published: %s", error)

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            if not self._closing:
                self._changed.wait(seconds)

    def _report(self, force: bool = False) -> None:
        """Publish the position when it has moved, and from time to time in case Redis has lost it; trim."""
        with self._changed:
            state = (self._consumed, self._covered)
        age = time.monotonic() - self._reported_at
        moved = state != self._reported
        # A trainer that has nothing left is told of at once, so that a producer at its mark goes on.
        patience = 0.0 if state[0] == self._decoded_to else _PUBLISH_S
        if not (force or self._untrimmed or age > _HEARTBEAT_S or (moved and age >= patience)):
            return
        answer = self.stream._run_script("position", state[0], state[1], self.trainer, _TRIM_AT_ONCE)
        trimmed, _, asked = (int(value) for value in answer)
        self._reported, self._reported_at = state, time.monotonic()
        self._untrimmed = trimmed == _TRIM_AT_ONCE
        with self._changed:
            news = bool(asked) and not self._checkpoint_asked and self._covered == state[1]
            if self._covered == state[1]:
                self._checkpoint_asked = bool(asked)
        if news and self._on_checkpoint_asked is not None:
            self._on_checkpoint_asked()

    @unavailable_on_loss
    def _read(self) -> None:
        """Take in what has arrived; wait a little for more when the next sample is missing."""
        with self._changed:
            full = self._decoded_to - self._consumed >= self._prefetch
            if full:
                # Until a good part is wanted again: not one round trip for each sample.
                enough = self._prefetch - max(self._prefetch // 4, 1)
                self._changed.wait_for(
                    lambda: self._closing or self._decoded_to - self._consumed <= enough, _PUBLISH_S
                )
        block = None if full or self._decoded_to in self._entries else _POLL_MS
        answer = self.stream.client.xread({self.stream.keys.tokens: self._last_id}, _READ_AT_ONCE, block)
        for entry_id, fields in answer[0][1] if answer else ():
            self._last_id = entry_id
            ordinal = int(fields[b"o"])
            if ordinal >= self._decoded_to:
                self._entries[ordinal] = fields

    def _decode(self) -> None:
        """Fetch and decode the next samples in order, up to the prefetch limit."""
        with self._changed:
            room = self._prefetch - (self._decoded_to - self._consumed)
        wanted: list[dict[bytes, bytes]] = []
        while len(wanted) < room and (entry := self._entries.get(self._decoded_to + len(wanted))) is not None:
            wanted.append(entry)
        if not wanted:
            return
        references = [entry.get(b"k", b"").decode().split() for entry in wanted]
        spans = self._spans.fetch({name for names in references for name in names})
        for entry, names in zip(wanted, references, strict=True):
            ordinal = self._decoded_to
            del self._entries[ordinal]
            if any(name not in spans for name in names):
                # Evicted or damaged: this entry is void; the probe finds that out and has the sample made
                # anew.
                return
            value = _assemble(entry, names, spans)
            self._decoded_to += 1
            self._missing_since = None
            with self._changed:
                self._ready[ordinal] = value
                self._changed.notify_all()

    def _probe(self) -> None:
        """Ask what has become of the next sample when it does not come."""
        if self._decoded_to in self._entries or (
            self._end_ordinal is not None and self._decoded_to >= self._end_ordinal
        ):
            self._missing_since = None
            return
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since < self._probe_s:
            return
        self._missing_since = now
        state = self.stream._run_script("probe", self._decoded_to)
        if state == b"published":
            # It lies behind the point read to: Redis has lost writes since, or its clock went back.
            self._last_id = b"0-0"
        elif state == b"asked":
            logger.warning(
                "token feed: sample %d of run %s is lost; ingest is asked to go again from it",
                self._decoded_to,
                self.stream.keys.run,
            )


def _assemble(
    entry: dict[bytes, bytes], names: list[str], spans: Mapping[str, TokenSpan]
) -> TokenSequence | Tombstone:
    head = read_head(entry[b"h"])
    if b"f" in entry:
        return Tombstone(head.sample_id, Failure.from_json(entry[b"f"]), head.metadata)
    segments = tuple(TokenSegment(spans[name], role) for name, role in zip(names, head.roles, strict=True))
    return TokenSequence(head.sample_id, segments, head.metadata)
