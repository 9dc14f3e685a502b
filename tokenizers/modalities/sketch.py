"""Line drawings as pictures: a PNG of dark ink on a light ground; exact up to 64 x 64 pixels.

A cell of the 16 x 16 grid holds its 4 x 4 pixels, one bit each; coarser scales hold the drawing at half, a
quarter, … of the size, where a pixel has ink if any below it has, so that thin lines stay. A larger drawing
is shrunk the same way. The modality ``strokes`` holds drawings as lines of a pen.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.tokens import ResizePad, TokenSpan
from ernie5.tokenizers.modalities.arrays import fitted, nearest, reduce_bins
from ernie5.tokenizers.modalities.cells import (
    SCHEDULE,
    SIDE,
    join_cells,
    make_span,
    pack,
    read_scales,
    split_cells,
    unpack,
)
from ernie5.tokenizers.modalities.codec import SAMPLES, Codec, Figure, SampleFile
from ernie5.tokenizers.modalities.pictures import PNG, read_grey, write_grey

BLOCK = 4  # pixels a cell's side
CANVAS = BLOCK * SIDE
DECODED_SIDE_LIMIT = 512


class SketchCodec(Codec[np.ndarray]):
    """Ink, bool ``[H, W]``."""

    modality = MODALITIES["sketch"]
    content_types = (PNG,)
    promise = "every pixel exact up to 64x64 pixels; larger ones shrunk to that, thin lines kept"
    sample = SampleFile(
        SAMPLES / "sketch.png", PNG, "the cat of strokes.json, drawn with 1 pixel lines", "Apache-2.0"
    )

    def read(self, data: bytes, content_type: str) -> np.ndarray:
        grey = read_grey(data, "a sketch")
        return grey < (32768 if grey.dtype == np.uint16 else 128)

    def write(self, value: np.ndarray, content_type: str) -> bytes:
        return write_grey(np.where(value, 0, 255).astype(np.uint8))

    def encode(self, value: np.ndarray, base: Any, *, features: bool = False) -> TokenSpan:
        if not value.size:
            raise InvalidMediaError("the sketch has no pixels", param="data")
        height, width = fitted(value.shape[0], value.shape[1], CANVAS)
        top, left = (CANVAS - height) // 2, (CANVAS - width) // 2
        canvas = np.zeros((CANVAS, CANVAS), bool)
        canvas[top : top + height, left : left + width] = reduce_bins(value, height, width, np.logical_or)
        bitmaps = [reduce_bins(canvas, BLOCK * grid[0], BLOCK * grid[1], np.logical_or) for grid in SCHEDULE]
        scales = [pack(split_cells(bitmap, BLOCK), 1) for bitmap in bitmaps]
        source = value.shape
        transform = ResizePad(source[0], source[1], height, width, top, left, CANVAS, CANVAS)
        values = split_cells(canvas, BLOCK) * 2.0 - 1.0 if features else None
        return make_span(self.modality.name, scales, base, transform=transform, values=values)

    def decode(self, span: TokenSpan, base: Any) -> np.ndarray:
        """Ink of the finest scale: padding cropped, at the source's size up to 512 pixels a side."""
        self.check_span(span, base)
        scales, transform = read_scales(span)
        canvas = join_cells(unpack(scales[-1], 1), BLOCK).astype(bool)
        return placed(canvas, transform, nearest)

    def compare(self, original: np.ndarray, decoded: np.ndarray) -> Figure:
        wrong = float((original != decoded).mean()) if original.shape == decoded.shape else math.inf
        limit = 0.0 if max(original.shape) <= CANVAS else 1.0
        return Figure("share of pixels that differ", wrong, "", limit)


def placed(canvas: np.ndarray, transform: ResizePad | None, resize: Any) -> np.ndarray:
    """The source's part of a canvas, resized back; all of it without a transform.

    Raises:
        InvalidInputError: the transform is for another canvas.
    """
    if transform is None:
        return canvas
    if canvas.shape != (transform.canvas_height, transform.canvas_width):
        raise InvalidInputError(
            f"transform {transform} is not for a canvas of {canvas.shape}", param="layout"
        )
    part = canvas[transform.top :, transform.left :][: transform.height, : transform.width]
    height, width = fitted(transform.source_height, transform.source_width, DECODED_SIDE_LIMIT)
    if (height, width) == part.shape:
        return part
    if height < part.shape[0] or width < part.shape[1]:
        raise InvalidInputError(f"transform {transform} enlarges its source", param="layout")
    return resize(part, height, width)
