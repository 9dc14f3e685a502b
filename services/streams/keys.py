"""Names of all keys and the small records that travel through them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie5.protocol.modalities import ServiceName
from ernie5.protocol.samples import Segment

SERVICES: tuple[ServiceName, ...] = ("text", "audio", "vision")
GROUP = "tokenizers"
REQUESTS = "requests"

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def reply_key(request_id: str) -> str:
    """The stream that carries the answer to one request."""
    return f"reply:{request_id}"


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Keys of one run; ``{run}`` is its name.

    ``{run}:work:{service}`` media to tokenise; ``{run}:tokens`` assembled samples; ``{run}:dead`` dead
    letters; ``{run}:position`` what the trainer has consumed and a checkpoint covers; ``{run}:ingest``
    ingest's cursor; ``{run}:control`` wishes of one side to the other; ``{run}:corpus``,
    ``{run}:tokenizers``, ``{run}:counters``, ``{run}:open``, ``{run}:sample:{ordinal}`` see the scripts.
    """

    run: str

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise InvalidInputError(
                f"run name {self.run!r} must be 1 to 64 letters, digits, '.', '_', '-', "
                "and start with a letter or digit",
                param="run",
            )

    def work(self, service: str) -> str:
        if service not in SERVICES:
            raise InvalidInputError(
                f"unknown service {service!r}; known: {', '.join(SERVICES)}", param="service"
            )
        return f"{self.run}:work:{service}"

    def named(self, name: str) -> str:
        return f"{self.run}:{name}"

    @property
    def tokens(self) -> str:
        return f"{self.run}:tokens"

    @property
    def dead(self) -> str:
        return f"{self.run}:dead"

    @property
    def position(self) -> str:
        return f"{self.run}:position"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Order identity of a sample: ``position`` in ``[0, length)`` of an ``epoch``."""

    epoch: int
    position: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.position < 0:
            raise InvalidInputError(f"epoch {self.epoch} and position {self.position} must not be negative")

    def ordinal(self, length: int) -> int:
        """One dense count over all epochs of ``length`` samples."""
        if self.position >= length:
            raise InvalidInputError(f"position {self.position} lies outside an epoch of {length} samples")
        return self.epoch * length + self.position

    @classmethod
    def of(cls, ordinal: int, length: int) -> Position:
        return cls(*divmod(ordinal, length))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a segment, and with it its sample, can't be had."""

    type: str
    message: str
    segment: int | None = None
    modality: str | None = None
    attempts: int = 1
    media_hash: str | None = None

    @classmethod
    def of(cls, error: BaseException | str, **details: Any) -> Failure:
        if isinstance(error, str):
            return cls("failed", error[:2000], **details)
        kind = error.type if isinstance(error, ErnieMultiError) else type(error).__name__
        return cls(kind, str(error)[:2000], **details)

    def as_json(self) -> str:
        return json.dumps(
            {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        )

    @classmethod
    def from_json(cls, text: bytes | str) -> Failure:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Stands at the position of a sample that can't be had."""

    sample_id: str
    failure: Failure
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry of ``{run}:dead``."""

    entry_id: str
    ordinal: int
    sample_id: str
    failure: Failure
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkEntry:
    """A segment to tokenise, as read from a work stream.

    ``attempts`` counts this delivery too. ``error`` is set where the payload can't be decoded.
    """

    service: ServiceName
    entry_id: str
    ordinal: int
    index: int
    media_hash: str
    attempts: int
    segment: Segment | None
    error: ErnieMultiError | None = None
