"""Cells of 16 bits on the grids of the vision tokenizer: what depth maps, sketches and point clouds share.

All three use the largest grid, 16 x 16, and its schedule (1, 1), (2, 2), (4, 4), (8, 8), (16, 16); coarse
scales hold the same thing at a lower resolution, so that a model can go from coarse to fine. Depth maps and
point clouds need numbers besides (where and how large): their first two scales are five 16-bit numbers
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.tokens import ResizePad, ScalesLayout, TokenSpan
from ernie5.tokenizers.modalities.features import encoder_shapes, fill

SIDE = 16
SCHEDULE = schedule_for((SIDE, SIDE))
HEADER_SCALES = 2
BITS = 16


def make_span(
    modality: str,
    scales: Sequence[np.ndarray],
    base: Any,
    *,
    transform: ResizePad | None = None,
    values: np.ndarray | None = None,
) -> TokenSpan:
    """The span of cell codes ``[h, w]``, one array a scale.

    ``base`` is the vision tokenizer; where its cells have more than 16 bits, the others stay 0. ``values``
    float ``[SIDE, SIDE, d]`` become the features: 2 x 2 neighbouring cells a position, as the encoder's own.
    """
    if base.bits < BITS:
        raise InvalidInputError(
            f"{modality} needs cells of {BITS} bits, this vision tokenizer has {base.bits}"
        )
    codes = np.concatenate([np.asarray(scale, np.uint32).reshape(-1) for scale in scales])
    features = {}
    if values is not None:
        half = SIDE // 2
        blocks = values.reshape(half, 2, half, 2, -1).transpose(0, 2, 1, 3, 4)
        features = fill(blocks.reshape(half * half, 4, -1), encoder_shapes(base, "image"))
    layout = ScalesLayout(base.bits, SCHEDULE, transform=transform)
    return TokenSpan(modality, layout, codes, base.hash, features=features)


def read_scales(span: TokenSpan) -> tuple[list[np.ndarray], ResizePad | None]:
    """The scales of a span as uint16 ``[h, w]``, and its transform.

    Raises:
        InvalidInputError: another schedule, several frames, or codes beyond 16 bits.
    """
    layout = span.layout
    assert isinstance(layout, ScalesLayout)
    if layout.schedule != SCHEDULE or layout.frames != 1:
        raise InvalidInputError(
            f"a {span.modality} has one frame of scales {SCHEDULE}, not {layout.frames} of {layout.schedule}",
            param="layout",
        )
    if int(span.codes.max()) >= 1 << BITS:
        raise InvalidInputError(f"a {span.modality} has cells of {BITS} bits", param="codes")
    ends = np.cumsum([height * width for height, width in SCHEDULE])
    parts = np.split(span.codes.astype(np.uint16), ends[:-1])
    return [part.reshape(grid) for part, grid in zip(parts, SCHEDULE)], layout.transform


def header(numbers: Sequence[int]) -> list[np.ndarray]:
    """Five 16-bit numbers as the scales (1, 1) and (2, 2)."""
    cells = np.array(numbers, np.uint16)
    return [cells[:1].reshape(1, 1), cells[1:].reshape(2, 2)]


def read_header(scales: Sequence[np.ndarray]) -> list[int]:
    """What :func:`header` was given."""
    return [int(cell) for scale in scales[:HEADER_SCALES] for cell in scale.reshape(-1)]


def float_halves(value: float) -> tuple[int, int]:
    """A float32 as its upper and lower 16 bits."""
    whole = int(np.float32(value).view(np.uint32))
    return whole >> 16, whole & 0xFFFF


def from_halves(upper: int, lower: int) -> float:
    """The float32 of two halves; ``InvalidInputError`` where it isn't finite."""
    value = float(np.uint32(upper << 16 | lower).view(np.float32))
    if not np.isfinite(value):
        raise InvalidInputError("a number of the first two scales is not finite", param="codes")
    return value


def split_cells(image: np.ndarray, side: int) -> np.ndarray:
    """``[side h, side w]`` to ``[h, w, side * side]``: each cell's block, row-major."""
    height, width = image.shape[0] // side, image.shape[1] // side
    return image.reshape(height, side, width, side).transpose(0, 2, 1, 3).reshape(height, width, side * side)


def join_cells(blocks: np.ndarray, side: int) -> np.ndarray:
    """``[h, w, side * side]`` to ``[side h, side w]``."""
    height, width = blocks.shape[:2]
    return (
        blocks.reshape(height, width, side, side).transpose(0, 2, 1, 3).reshape(height * side, width * side)
    )


def pack(parts: np.ndarray, bits: int) -> np.ndarray:
    """``[h, w, n]`` numbers of ``bits`` bits to ``[h, w]`` codes; the first lies in the lowest bits."""
    shifts = bits * np.arange(parts.shape[-1], dtype=np.uint32)
    return (parts.astype(np.uint32) << shifts).sum(axis=-1, dtype=np.uint32)


def unpack(codes: np.ndarray, bits: int) -> np.ndarray:
    """``[h, w]`` 16-bit codes to ``[h, w, 16 / bits]`` numbers."""
    shifts = bits * np.arange(BITS // bits, dtype=np.uint32)
    return (codes[..., None].astype(np.uint32) >> shifts) & ((1 << bits) - 1)
