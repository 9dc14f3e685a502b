"""The trainer's view of the stream: token sequences in order, nothing of Redis."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.tokens import TokenSequence
from ernie5.services.streams import Position, RunStream, TokenFeed, Tombstone

logger = logging.getLogger(__name__)


class TrainerFeed:
    """An iterator of :class:`TokenSequence` in (epoch, position) order; tombstones are counted and skipped.

    ``start`` is the position of a checkpoint, as :meth:`state` gave it (None: the beginning)::

        with TrainerFeed(stream, checkpoint.get("stream")) as feed:
            for sequence in feed:
                ...
                if step_is_due or feed.checkpoint_asked:
                    save(..., stream=feed.state())
                    feed.commit()

    Further options go to :class:`~ernie5.services.streams.TokenFeed`.
    """

    def __init__(
        self,
        stream: RunStream,
        start: Mapping[str, int] | None = None,
        *,
        on_tombstone: Callable[[Position, Tombstone], None] | None = None,
        **options: Any,
    ) -> None:
        first = Position(0, 0) if start is None else _position(start)
        self._feed = TokenFeed(stream, first, **options)
        self._on_tombstone = on_tombstone
        self.delivered = 0
        self.tombstones: Counter[str] = Counter()
        """Skipped samples by the type of their failure."""

    def __enter__(self) -> TrainerFeed:
        self._feed.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.close()

    def close(self) -> None:
        self._feed.close()

    def __iter__(self) -> Iterator[TokenSequence]:
        return self

    def __next__(self) -> TokenSequence:
        while (item := self._feed.next()) is not None:
            position, value = item
            if isinstance(value, TokenSequence):
                self.delivered += 1
                return value
            self.tombstones[value.failure.type] += 1
            logger.warning(
                "sample (%d, %d) is skipped: %s", position.epoch, position.position, value.failure.message
            )
            if self._on_tombstone is not None:
                self._on_tombstone(position, value)
        raise StopIteration

    def state(self) -> dict[str, int]:
        """The next position, for a checkpoint: ``{"epoch": …, "position": …}``."""
        position = self._feed.position
        return {"epoch": position.epoch, "position": position.position}

    def commit(self, state: Mapping[str, int] | None = None) -> None:
        """A checkpoint on disk covers all samples before ``state`` (default: those handed out so far)."""
        self._feed.commit(self._feed.position if state is None else _position(state))

    @property
    def checkpoint_asked(self) -> bool:
        """Whether the stream needs a checkpoint soon, to trim what it covers."""
        return self._feed.checkpoint_asked


def _position(state: Mapping[str, int]) -> Position:
    try:
        return Position(int(state["epoch"]), int(state["position"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"a stream position has epoch and position, got {state!r}", param="start"
        ) from error
