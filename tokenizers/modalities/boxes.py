"""Bounding boxes and layouts: labelled rectangles on a page or picture, JSON in and out.

``{"width": 640, "height": 480, "boxes": [{"label": "cat", "box": [x0, y0, x1, y1]}, …]}``, in pixels. Corners
lie on a grid of 1000 steps a side, as Pix2Seq (Chen et al., 2021, section 2.1) bins them, so each moves by at
most half a thousandth of the side. Canonical text: ``width height``, then ``label<tab>x0 y0 x1 y1`` a line.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.protocol.modalities import MODALITIES
from ernie5.tokenizers.modalities.codec import (
    SAMPLES,
    Figure,
    SampleFile,
    TextCodec,
    escape,
    integers,
    unescape,
    utf8,
)

STEPS = 1000
MAX_SIDE = 1_000_000
MAX_BOXES = 4096


@dataclass(frozen=True, slots=True)
class Page:
    """Boxes ``(label, x0, y0, x1, y1)`` on a page of ``width`` x ``height`` pixels."""

    width: int
    height: int
    boxes: tuple[tuple[str, float, float, float, float], ...]


class BoxesCodec(TextCodec[Page]):
    """Labels exact, corners within 1/2000 of the side."""

    modality = MODALITIES["boxes"]
    content_types = ("application/vnd.ernie-multi.boxes+json",)
    promise = "labels exact, corners within 1/2000 of the side"
    sample = SampleFile(
        SAMPLES / "boxes.json",
        content_types[0],
        "outlines of the drawings in docs/pictures/vision-samples.png, measured",
        "Apache-2.0",
    )

    def read(self, data: bytes, content_type: str) -> Page:
        value = read_json(data, "boxes")
        if not isinstance(value, dict) or set(value) != {"width", "height", "boxes"}:
            raise InvalidMediaError(
                'boxes must be {"width", "height", "boxes": [{"label", "box"}]}', param="data"
            )
        width, height = (read_side(value[name], name) for name in ("width", "height"))
        listed = value["boxes"]
        if not isinstance(listed, list):
            raise InvalidMediaError("boxes must be a list", param="boxes")
        if len(listed) > MAX_BOXES:
            raise MediaTooLargeError(f"{len(listed)} boxes exceed the limit of {MAX_BOXES}", param="boxes")
        return Page(
            width, height, tuple(_box(item, width, height, f"boxes[{n}]") for n, item in enumerate(listed))
        )

    def write(self, value: Page, content_type: str) -> bytes:
        boxes = [{"label": label, "box": list(corners)} for label, *corners in value.boxes]
        page = {"width": value.width, "height": value.height, "boxes": boxes}
        return json.dumps(page, ensure_ascii=False).encode()

    def to_text(self, value: Page) -> str:
        lines = [f"{value.width} {value.height}"]
        for label, *corners in value.boxes:
            sides = (value.width, value.height) * 2
            steps = [str(round(corner / side * STEPS)) for corner, side in zip(corners, sides)]
            lines.append(f"{escape(label)}\t{' '.join(steps)}")
        return "\n".join(lines)

    def from_text(self, text: str) -> Page:
        first, *lines = text.split("\n")
        width, height = integers(first, 2, "size of the page")
        if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
            raise InvalidInputError(
                f"page of {width}x{height} is outside 1 to {MAX_SIDE} a side", param="codes"
            )
        boxes = []
        for line in lines:
            label, _, corners = line.partition("\t")
            x0, y0, x1, y1 = integers(corners, 4, f"box {label[:40]!r}")
            if not (0 <= x0 <= x1 <= STEPS and 0 <= y0 <= y1 <= STEPS):
                raise InvalidInputError(f"box {x0} {y0} {x1} {y1} leaves the grid of {STEPS}", param="codes")
            boxes.append(
                (
                    unescape(label),
                    x0 * width / STEPS,
                    y0 * height / STEPS,
                    x1 * width / STEPS,
                    y1 * height / STEPS,
                )
            )
        return Page(width, height, tuple(boxes))

    def compare(self, original: Page, decoded: Page) -> Figure:
        name, unit, limit = "largest shift of a corner", "of the side", 0.5 / STEPS + 1e-9
        same = (original.width, original.height) == (decoded.width, decoded.height)
        if not same or [box[0] for box in original.boxes] != [box[0] for box in decoded.boxes]:
            return Figure(name, math.inf, unit, limit)
        sides = (original.width, original.height) * 2
        shifts = [
            abs(left - right) / side
            for box, other in zip(original.boxes, decoded.boxes)
            for left, right, side in zip(box[1:], other[1:], sides)
        ]
        return Figure(name, max(shifts, default=0.0), unit, limit)


def read_json(data: bytes, what: str) -> Any:
    """The value of a JSON file."""
    try:
        return json.loads(utf8(data, what))
    except RecursionError:
        raise InvalidMediaError(f"{what}: JSON nests too deep", param="data") from None
    except ValueError as error:
        raise InvalidMediaError(f"{what}: not JSON: {error}", param="data") from None


def read_side(value: Any, where: str) -> int:
    """A side in whole pixels."""
    if type(value) is not int or not 1 <= value <= MAX_SIDE:
        raise InvalidMediaError(
            f"{where} must be an integer from 1 to {MAX_SIDE}, got {value!r:.40}", param=where
        )
    return value


def read_number(value: Any, where: str) -> float:
    """A finite number."""
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise InvalidMediaError(f"{where} must be a finite number, got {value!r:.40}", param=where)
    return value


def _box(item: Any, width: int, height: int, where: str) -> tuple[str, float, float, float, float]:
    if not isinstance(item, dict) or set(item) != {"label", "box"} or not isinstance(item["label"], str):
        raise InvalidMediaError(f'{where} must be {{"label": …, "box": [x0, y0, x1, y1]}}', param=where)
    corners = item["box"]
    if not isinstance(corners, list) or len(corners) != 4:
        raise InvalidMediaError(f"{where}.box must hold 4 numbers", param=where)
    x0, y0, x1, y1 = (read_number(corner, f"{where}.box") for corner in corners)
    if not (0 <= x0 <= x1 <= width and 0 <= y0 <= y1 <= height):
        raise InvalidMediaError(
            f"{where}.box {corners} is not inside {width}x{height}: 0 <= x0 <= x1 <= width, so too y",
            param=where,
        )
    return item["label"], x0, y0, x1, y1
