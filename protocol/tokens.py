"""Unified tokens: what every tokenizer emits and the backbone consumes.

A :class:`TokenSpan` is one tokenised segment. Three *group layouts* carry all modalities (ERNIE 5.0
report, section 2):

* ``sequence``: one code a step; ``codes`` int32 ``[n]``.
* ``scales``: frames of grids from coarse to fine; each cell is one d-bit code, bit 0 = channel 0;
  ``codes`` uint32 ``[n]``, frame by frame, scale by scale, row-major.
* ``codebooks``: Q codes a frame; ``codes`` int16 ``[frames, Q]``.

Spans are immutable and validated when made, so whoever holds one may rely on shapes, dtypes and ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.samples import Role
from ernie5.protocol.vocabulary import UnifiedVocabulary

MAX_BITS = 32
MAX_CODES = 1 << 24


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """One code a step, each in ``[0, vocabulary_size)``."""

    kind: ClassVar[str] = "sequence"
    vocabulary_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.vocabulary_size <= 2**31 - 1:
            raise ValueError(f"vocabulary_size {self.vocabulary_size} is outside [1, 2**31 - 1]")

    def check(self, codes: np.ndarray) -> None:
        _expect(codes, np.int32, 1)
        _expect_range(codes, self.vocabulary_size)


@dataclass(frozen=True, slots=True)
class ResizePad:
    """How a picture was fitted to its canvas; all in pixels.

    The source of ``source_height`` x ``source_width`` was resized to ``height`` x ``width`` and placed
    at (``top``, ``left``) of a ``canvas_height`` x ``canvas_width`` canvas.
    """

    source_height: int
    source_width: int
    height: int
    width: int
    top: int
    left: int
    canvas_height: int
    canvas_width: int

    def __post_init__(self) -> None:
        if min(self.source_height, self.source_width, self.height, self.width) < 1:
            raise ValueError(f"resize transform has an empty picture: {self}")
        if min(self.top, self.left) < 0:
            raise ValueError(f"resize transform has a negative offset: {self}")
        if self.top + self.height > self.canvas_height or self.left + self.width > self.canvas_width:
            raise ValueError(f"resized picture does not fit its canvas: {self}")


@dataclass(frozen=True, slots=True)
class ScalesLayout:
    """Frames of grids, coarse to fine; one ``bits``-bit code a cell.

    ``schedule`` lists each scale's (height, width) in cells; the last one is the final grid.
    """

    kind: ClassVar[str] = "scales"
    bits: int
    schedule: tuple[tuple[int, int], ...]
    frames: int = 1
    transform: ResizePad | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"bits {self.bits} is outside [1, {MAX_BITS}]")
        if self.frames < 1:
            raise ValueError(f"frames {self.frames} is below 1")
        if not self.schedule:
            raise ValueError("schedule is empty")
        for height, width in self.schedule:
            if height < 1 or width < 1:
                raise ValueError(f"schedule holds an empty grid: {self.schedule}")
        if self.cells_per_frame * self.frames > MAX_CODES:
            raise ValueError(f"{self.cells_per_frame * self.frames} codes exceed the limit {MAX_CODES}")

    @property
    def final_grid(self) -> tuple[int, int]:
        return self.schedule[-1]

    @property
    def cells_per_frame(self) -> int:
        return sum(height * width for height, width in self.schedule)

    def check(self, codes: np.ndarray) -> None:
        _expect(codes, np.uint32, 1)
        if len(codes) != self.cells_per_frame * self.frames:
            raise ValueError(
                f"{len(codes)} codes do not fill {self.frames} frame(s) of {self.cells_per_frame} cells"
            )
        if self.bits < MAX_BITS:
            _expect_range(codes, 1 << self.bits)


@dataclass(frozen=True, slots=True)
class CodebooksLayout:
    """Q codes a frame, each in ``[0, codebook_size)``; level 0 is the most important.

    ``samples`` is the length of the source in samples at ``sample_rate`` (Hz), so that decoding
    restores it exactly; ``frame_rate`` is in frames a second. ``channels`` counts source channels.
    """

    kind: ClassVar[str] = "codebooks"
    codebook_size: int
    levels: int
    frame_rate: float
    sample_rate: float
    samples: int
    channels: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.codebook_size <= 2**15:
            raise ValueError(f"codebook_size {self.codebook_size} is outside [1, 32768]")
        if not 1 <= self.levels <= 256:
            raise ValueError(f"levels {self.levels} is outside [1, 256]")
        if not (0 < self.frame_rate < 1e9 and 0 < self.sample_rate < 1e9):
            raise ValueError(f"rates must be positive: {self.frame_rate}, {self.sample_rate}")
        if not 0 <= self.samples < 2**40 or not 1 <= self.channels <= 1024:
            raise ValueError(f"impossible length {self.samples} or channels {self.channels}")

    def check(self, codes: np.ndarray) -> None:
        _expect(codes, np.int16, 2)
        if codes.shape[1] != self.levels:
            raise ValueError(f"codes of shape {codes.shape} do not have {self.levels} levels")
        _expect_range(codes, self.codebook_size)


Layout = SequenceLayout | ScalesLayout | CodebooksLayout
LAYOUTS: dict[str, type[Layout]] = {
    layout.kind: layout for layout in (SequenceLayout, ScalesLayout, CodebooksLayout)
}


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """One tokenised segment.

    Attributes:
        modality: name in :data:`~ernie5.protocol.modalities.MODALITIES` or of a registered plug-in.
        layout: how ``codes`` are grouped.
        codes: integers, end to end; dtype and shape by layout (see the module's text).
        tokenizer: hash of the tokenizer's weights, device kind and dtype (hex).
        features: for understanding, per named encoder, float16 ``[N, K, D]``: N tokens of K adjacent
            patches of D values (K = 4 for an image, 16 for video), taken before quantisation.
        latent: float16 ``[h, w, d]`` of the final grid before quantisation, where asked.
        metadata: small JSON values (for instance ``speaker``); never needed for decoding.

    Raises:
        ValueError: dtype, shape or range do not fit the layout.
    """

    modality: str
    layout: Layout
    codes: np.ndarray
    tokenizer: str
    features: Mapping[str, np.ndarray] = field(default_factory=dict)
    latent: np.ndarray | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = MODALITIES.get(self.modality)
        if known is not None and known.layout != self.layout.kind:
            raise ValueError(f"{self.modality} uses the {known.layout} layout, not {self.layout.kind}")
        self.layout.check(self.codes)
        for name, values in self.features.items():
            _expect(values, np.float16, 3, what=f"features[{name!r}]")
        if self.latent is not None:
            _expect(self.latent, np.float16, 3, what="latent")
        for array in (self.codes, *self.features.values(), self.latent):
            if array is not None:
                array.setflags(write=False)

    def __len__(self) -> int:
        """Number of codes along the sequence axis (cells, frames or steps)."""
        return len(self.codes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSpan):
            return NotImplemented
        return (
            (self.modality, self.layout, self.tokenizer) == (other.modality, other.layout, other.tokenizer)
            and dict(self.metadata) == dict(other.metadata)
            and self.features.keys() == other.features.keys()
            and _same(self.codes, other.codes)
            and all(_same(self.features[name], other.features[name]) for name in self.features)
            and (self.latent is None) == (other.latent is None)
            and (self.latent is None or other.latent is None or _same(self.latent, other.latent))
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """A span and its role in a sample."""

    span: TokenSpan
    role: Role


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The spans of one sample, in order, and how markers join them."""

    sample_id: str
    segments: tuple[TokenSegment, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def events(self, vocabulary: UnifiedVocabulary) -> Iterator[tuple[int | TokenSpan, bool]]:
        """Markers (as ids) and spans in the order the backbone sees them, each with "is target".

        ``begin_sample``, then a role marker at each change of role; media between their begin and end
        markers, text bare, with a separator between neighbouring sequences of one role; a generated picture's
        grid marker precedes its codes; a run of targets ends with ``end_turn``. A marker is a target when it
        has to be generated: inside a run of targets, all but the role marker that opens it.
        """
        marker = vocabulary.marker
        yield marker("begin_sample"), False
        role: Role | None = None
        after_bare = False
        for segment in self.segments:
            target = segment.role == "target"
            if segment.role != role:
                if role == "target":
                    yield marker("end_turn"), True
                yield marker(segment.role), False
                after_bare = False
            bare = segment.span.modality in ("text", "code")
            if bare:
                if after_bare:
                    yield marker("separator"), target
                yield segment.span, target
            else:
                yield marker(f"begin_{segment.span.modality}"), target
                if target and isinstance(segment.span.layout, ScalesLayout):
                    height, width = segment.span.layout.final_grid
                    yield marker(f"grid_{height}x{width}"), True
                yield segment.span, target
                yield marker(f"end_{segment.span.modality}"), target
            role, after_bare = segment.role, bare
        if role == "target":
            yield marker("end_turn"), True


def _expect(array: np.ndarray, dtype: type, ndim: int, what: str = "codes") -> None:
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(
            f"{what} must be {np.dtype(dtype).name} with {ndim} dimension(s), got {array.dtype} {array.shape}"
        )
    if array.size > MAX_CODES:
        raise ValueError(f"{what} holds {array.size} values, above the limit {MAX_CODES}")


def _expect_range(codes: np.ndarray, end: int) -> None:
    if codes.size and (int(codes.min()) < 0 or int(codes.max()) >= end):
        raise ValueError(f"codes in [{codes.min()}, {codes.max()}] leave the range [0, {end})")


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()
