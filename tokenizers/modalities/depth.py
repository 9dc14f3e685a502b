"""Depth maps: 16-bit PNG in millimetres (0 = no measurement) or ``.npy`` in metres.

The map is shrunk to at most 32 x 32 by means over bins and normalised to its own range, which the first two
scales hold. Scales (4, 4), (8, 8), (16, 16) then code it at 8, 16 and 32 pixels a side, 4 bits a pixel, 2 x 2
pixels a cell: each codes the difference from the enlarged scale before it (a Laplacian pyramid, Burt and
Adelson, 1983, with the quantiser inside the loop), on 15 levels that double, for a smooth map has small
differences. The 16th says "no measurement".

A pixel at 32 x 32 is therefore off by at most the larger of 1/256 of the range and a third of its difference
from its coarser surroundings, as long as that difference is below two thirds of the range (`residual_error`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.tokens import ResizePad, TokenSpan
from ernie5.tokenizers.modalities.arrays import (
    NPY,
    bilinear,
    check_finite,
    fitted,
    nearest,
    read_npy,
    reduce_bins,
    write_npy,
)
from ernie5.tokenizers.modalities.cells import (
    HEADER_SCALES,
    SCHEDULE,
    SIDE,
    float_halves,
    from_halves,
    header,
    join_cells,
    make_span,
    pack,
    read_header,
    read_scales,
    split_cells,
    unpack,
)
from ernie5.tokenizers.modalities.codec import SAMPLES, Codec, Figure, SampleFile
from ernie5.tokenizers.modalities.pictures import MAX_PIXELS, PNG, read_grey, write_grey
from ernie5.tokenizers.modalities.sketch import placed

BLOCK = 2  # pixels a cell's side
CANVAS = BLOCK * SIDE
_HOLE = 15
_STEPS = 2.0 ** np.arange(-7, 0)
LEVELS = np.concatenate((-_STEPS[::-1], [0.0], _STEPS))
_MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2
_START = 0.5  # what the coarsest scale is told against


class DepthCodec(Codec[np.ndarray]):
    """Metres, float64 ``[H, W]``; 0 where there is no measurement."""

    modality = MODALITIES["depth"]
    content_types = (NPY, PNG)
    promise = "32x32 pixels, 4 bits each, in the map's own range"
    sample = SampleFile(
        SAMPLES / "depth.npy",
        NPY,
        "terrain at the Jacksboro fault, seen from 1,200 m above the sea: SRTM (USGS), matplotlib 3.11.2",
        "public domain",
    )

    def read(self, data: bytes, content_type: str) -> np.ndarray:
        if content_type == PNG or data.startswith(b"\x89PNG"):
            levels = read_grey(data, "a depth map")
            if levels.dtype != np.uint16:
                raise InvalidMediaError("a depth PNG has 16 bits, in millimetres", param="data")
            depth = levels / 1000.0
        else:
            depth = read_npy(data, "a depth map", 2)
            if depth.size > MAX_PIXELS:
                raise MediaTooLargeError(
                    f"depth map of {depth.shape} exceeds {MAX_PIXELS} pixels", param="data"
                )
            check_finite(depth, "the depth map")
            if depth.size and depth.min() < 0:
                raise InvalidMediaError(
                    f"depth {depth.min()} is negative; metres from the eye are not", param="data"
                )
            if depth.size and depth.max() > 1e9:
                raise InvalidMediaError(f"depth {depth.max()} m is beyond 1e9 m", param="data")
        if not depth.size or not depth.any():
            raise InvalidMediaError("the depth map has no measured pixel", param="data")
        return depth

    def write(self, value: np.ndarray, content_type: str) -> bytes:
        if content_type == NPY:
            return write_npy(value.astype(np.float32))
        if value.max() > 65.535:
            raise InvalidMediaError(
                f"depth up to {value.max():.6g} m doesn't fit millimetres of 16 bits; ask for {NPY}",
                param="Accept",
            )
        return write_grey(np.round(value * 1000).astype(np.uint16))

    def encode(self, value: np.ndarray, base: Any, *, features: bool = False) -> TokenSpan:
        height, width = fitted(value.shape[0], value.shape[1], CANVAS)
        measured = reduce_bins((value > 0).astype(np.int64), height, width, np.add)
        small = reduce_bins(value, height, width, np.add) / np.maximum(measured, 1)
        near = float(np.float32(small[measured > 0].min()))
        extent = max(0.0, float(np.float32(small.max() - near)))
        unit = np.clip((small - near) / (extent or 1.0), 0, 1)
        # Padding repeats the edge, so that it makes no step; it lies below and to the right.
        padding = ((0, CANVAS - height), (0, CANVAS - width))
        unit, holes = np.pad(unit, padding, mode="edge"), np.pad(measured == 0, padding, mode="edge")
        upper, lower = zip(float_halves(extent), float_halves(near))
        scales = [*header([*upper, *lower, 0]), *_encode_pyramid(unit, holes)]
        transform = ResizePad(value.shape[0], value.shape[1], height, width, 0, 0, CANVAS, CANVAS)
        values = None
        if features:
            shown = np.where(holes, 0.0, unit * 2 - 1)
            values = np.concatenate((split_cells(shown, BLOCK), split_cells(holes * 1.0, BLOCK)), axis=2)
        return make_span(self.modality.name, scales, base, transform=transform, values=values)

    def decode(self, span: TokenSpan, base: Any) -> np.ndarray:
        """Metres at the source's size, up to 512 pixels a side; 0 where there was no measurement."""
        self.check_span(span, base)
        scales, transform = read_scales(span)
        extent_upper, near_upper, extent_lower, near_lower, _ = read_header(scales)
        extent, near = from_halves(extent_upper, extent_lower), from_halves(near_upper, near_lower)
        if extent < 0 or near < 0 or near + extent > 1e9 * 1.001:
            raise InvalidInputError(f"depth from {near} m on, {extent} m deep, is impossible", param="codes")
        unit, holes = _decode_pyramid(scales[HEADER_SCALES:])
        depth = near + np.clip(unit, 0, 1) * extent
        large = placed(depth, transform, bilinear)
        return np.where(placed(holes, transform, nearest), 0.0, large)

    def compare(self, original: np.ndarray, decoded: np.ndarray) -> Figure:
        name, unit, limit = "root mean square error", "of the range", 0.05
        if original.shape != decoded.shape:
            return Figure(name, math.inf, unit, limit)
        both = (original > 0) & (decoded > 0)
        extent = float(np.ptp(original[both])) or 1.0 if both.any() else 1.0
        error = (original - decoded)[both]
        return Figure(
            name, float(np.sqrt((error**2).mean()) / extent) if both.any() else math.inf, unit, limit
        )


def residual_error(difference: np.ndarray) -> np.ndarray:
    """The largest error with which a difference (in [-1, 1] of the range) is coded."""
    size = np.abs(difference)
    return np.maximum.reduce([np.full_like(size, 1 / 256), np.minimum(size / 3, 1 / 8), size - 0.5])


def _encode_pyramid(unit: np.ndarray, holes: np.ndarray) -> list[np.ndarray]:
    """``[CANVAS, CANVAS]`` in [0, 1] to the codes of the scales after the header."""
    scales = []
    told = np.full((1, 1), _START)
    for grid in SCHEDULE[HEADER_SCALES:]:
        side = BLOCK * grid[0]
        share = (CANVAS // side) ** 2
        seen = reduce_bins((~holes).astype(np.int64), side, side, np.add)
        here = reduce_bins(np.where(holes, 0.0, unit), side, side, np.add) / np.maximum(seen, 1)
        assert seen.max() <= share
        expected = bilinear(told, side, side)
        level = np.searchsorted(_MIDDLES, here - expected)
        told = expected + np.where(seen > 0, LEVELS[level], 0.0)
        scales.append(pack(split_cells(np.where(seen > 0, level, _HOLE), BLOCK), 4))
    return scales


def _decode_pyramid(scales: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Values ``[CANVAS, CANVAS]`` and which of them were not measured."""
    told = np.full((1, 1), _START)
    holes = np.zeros((1, 1), bool)
    for scale in scales:
        level = join_cells(unpack(scale, 4), BLOCK)
        holes = level == _HOLE
        told = bilinear(told, *level.shape) + np.where(holes, 0.0, LEVELS[np.minimum(level, _HOLE - 1)])
    return told, holes
