"""What the gateway asks of an inference engine and what the engine answers.

A :class:`Request` holds the unified tokens of the conversation so far and its :class:`GenerationParams`.
An :class:`Engine` takes requests into its running batch and, step by step, yields events: text and marker
ids one by one, each generated medium as one finished span, then the end. The events of a request are a
complete record of its progress: handed back with ``submit(request, resume=events)`` they let another
engine go on where a lost one stopped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.grids import GRIDS
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.tokens import TokenSequence, TokenSpan

FinishReason = Literal["stop", "length", "cancelled"]

MAX_NEW_TOKENS = 65_536


class GenerationParams(BaseModel):
    """How to generate; the same values serve as JSON on the ``requests`` stream.

    Attributes:
        max_tokens: limit on what is generated: text and marker ids, cells of pictures, frames of sounds. A
            picture that has begun is finished beyond the limit; a sound ends at it.
        temperature: of every draw; 0 is greedy (and ``top_p``, ``top_k`` then play no part).
        media_temperature: of codes of media; None takes ``temperature``.
        top_p: nucleus of text and marker draws, in (0, 1].
        top_k: keep the k likeliest text and marker ids; 0 keeps all.
        seed: of the request's own random generator; None draws one. Equal seed, request and engine give equal
            answers, whatever else is in the batch.
        stop_ids: text or marker ids that end the answer and are left out of it (``end_turn`` always does).
        depth: share of the network's layers to run, in (0, 1]; None runs all.
        width: share of the routed experts in play, in (0, 1]; None takes all.
        experts_per_token: routed experts a token; None takes the model's own number.
        image_grid: final grid (height, width) in cells of generated pictures; None lets the model choose.
        audio_levels: residual levels to generate; None takes all of the model's.
        max_frames: limit on the frames of one generated sound; None leaves only ``max_tokens``.
        modalities: what the answer may hold; the begin markers of all other modalities are masked. Without
            ``text`` in it the answer begins with a medium.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    max_tokens: int = Field(default=256, ge=1, le=MAX_NEW_TOKENS)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    media_temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop_ids: tuple[int, ...] = ()
    depth: float | None = Field(default=None, gt=0.0, le=1.0)
    width: float | None = Field(default=None, gt=0.0, le=1.0)
    experts_per_token: int | None = Field(default=None, ge=1)
    image_grid: tuple[int, int] | None = None
    audio_levels: int | None = Field(default=None, ge=1, le=256)
    max_frames: int | None = Field(default=None, ge=1)
    modalities: tuple[str, ...] = Field(default=("text",), min_length=1)

    @field_validator("image_grid")
    @classmethod
    def _known_grid(cls, grid: tuple[int, int] | None) -> tuple[int, int] | None:
        if grid is not None and grid not in GRIDS:
            raise ValueError(f"image grid {grid} is none of {', '.join(f'{h}x{w}' for h, w in GRIDS)}")
        return grid

    @field_validator("modalities")
    @classmethod
    def _known_modalities(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in MODALITIES]
        if unknown:
            raise ValueError(f"unknown modalities {unknown}; known: {', '.join(MODALITIES)}")
        return names


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens: text and marker ids, cells of pictures (all scales), frames of sounds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    completion_text_tokens: int = 0
    completion_image_tokens: int = 0
    completion_audio_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to generate.

    ``sequence`` is the conversation so far: what the user gave as ``context`` segments, earlier answers as
    ``target`` segments. It ends with a context segment; the engine itself opens the answer with the
    ``target`` marker.
    """

    id: str
    sequence: TokenSequence
    params: GenerationParams = field(default_factory=GenerationParams)
    model: str = ""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated text or marker id of the unified vocabulary."""

    kind: ClassVar[str] = "token"
    request_id: str
    token: int


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """One finished generated medium; it follows the event of its ``begin_…`` (and grid) marker."""

    kind: ClassVar[str] = "span"
    request_id: str
    span: TokenSpan


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The last event of a request that ended well."""

    kind: ClassVar[str] = "done"
    request_id: str
    finish_reason: FinishReason
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The last event of a request that failed; ``type``, ``message``, ``status`` as in :mod:`.errors`."""

    kind: ClassVar[str] = "error"
    request_id: str
    message: str
    type: str = "internal_error"
    param: str | None = None
    status: int = 500


Event = TokenEvent | SpanEvent | DoneEvent | ErrorEvent


class Engine(Protocol):
    """A continuously batching generator; single-threaded, called by one inference worker.

    ``capacity`` is how many requests fit its running batch, ``active`` how many it holds now (running or
    waiting). The worker takes no request from the stream while ``active >= capacity``.
    """

    @property
    def capacity(self) -> int: ...

    @property
    def active(self) -> int: ...

    def submit(self, request: Request, resume: Sequence[Event] = ()) -> None:
        """Take a request; ``resume`` holds the token and span events that were already delivered.

        Those are not yielded again, but count towards ``max_tokens`` and the usage.

        Raises:
            InvalidInputError: the request can't be served (too long, foreign tokenizer, unknown ids).
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Drop a request (no further events); unknown ids are ignored."""
        ...

    def step(self) -> list[Event]:
        """Advance every running request by one step; an empty list when there is nothing to do."""
        ...


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model's name with the elastic choices that a request may append (``mini:d60-w50-k1``).

    ``depth`` and ``width`` are shares in (0, 1], written in per cent; ``experts_per_token`` is k.
    """

    name: str
    depth: float | None = None
    width: float | None = None
    experts_per_token: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.depth is not None:
            parts.append(f"d{self.depth * 100:g}")
        if self.width is not None:
            parts.append(f"w{self.width * 100:g}")
        if self.experts_per_token is not None:
            parts.append(f"k{self.experts_per_token}")
        return self.name + (":" + "-".join(parts) if parts else "")


_CHOICE = re.compile(r"d(?P<d>\d+(\.\d+)?)|w(?P<w>\d+(\.\d+)?)|k(?P<k>\d+)")


def parse_model_name(text: str) -> ModelChoice:
    """Split a model name such as ``mini:d60-w50-k1``; every part after the colon is optional.

    >>> parse_model_name("mini:d60-k1")
    ModelChoice(name='mini', depth=0.6, width=None, experts_per_token=1)

    Raises:
        InvalidInputError: an unknown or repeated part, a share outside (0, 100], k below 1.
    """
    name, colon, suffix = text.partition(":")
    found: dict[str, float] = {}
    for part in suffix.split("-") if colon else ():
        match = _CHOICE.fullmatch(part)
        if match is None or match.lastgroup is None:
            raise InvalidInputError(
                f"model {text!r}: {part!r} is none of d<per cent>, w<per cent>, k<experts> (mini:d60-w50-k1)",
                param="model",
            )
        letter = part[0]
        value = float(part[1:])
        if letter in found:
            raise InvalidInputError(f"model {text!r} gives {letter!r} twice", param="model")
        if letter in "dw" and not 0 < value <= 100:
            raise InvalidInputError(f"model {text!r}: {part!r} is outside (0, 100] per cent", param="model")
        if letter == "k" and value < 1:
            raise InvalidInputError(f"model {text!r}: k must be at least 1", param="model")
        found[letter] = value
    if not name:
        raise InvalidInputError(f"model {text!r} has no name before the colon", param="model")
    depth, width, k = found.get("d"), found.get("w"), found.get("k")
    return ModelChoice(
        name,
        depth=None if depth is None else depth / 100,
        width=None if width is None else width / 100,
        experts_per_token=None if k is None else int(k),
    )
