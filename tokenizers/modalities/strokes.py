"""Sketches as strokes of a pen: JSON in and out, in the form of Quick, Draw! with the size of the sheet.

``{"width": 256, "height": 256, "strokes": [[[x0, x1, …], [y0, y1, …]], …]}``. Points lie on a grid of 1000
steps a side and are told as differences from the one before (as in Sketch-RNN, Ha and Eck, 2017), each of
grid positions, so that errors don't add up. Canonical text: ``width height``, then a line a stroke: first
point, then steps. The modality ``sketch`` holds the same drawings as pictures.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.protocol.modalities import MODALITIES
from ernie5.tokenizers.modalities.boxes import MAX_SIDE, STEPS, read_json, read_number, read_side
from ernie5.tokenizers.modalities.codec import SAMPLES, Figure, SampleFile, TextCodec, integers

MAX_POINTS = 20_000


@dataclass(frozen=True, slots=True)
class Drawing:
    """Strokes, each a tuple of points (x, y), on a sheet of ``width`` x ``height``."""

    width: int
    height: int
    strokes: tuple[tuple[tuple[float, float], ...], ...]


class StrokesCodec(TextCodec[Drawing]):
    """Points within 1/2000 of the side; order and number of strokes and points exact."""

    modality = MODALITIES["strokes"]
    content_types = ("application/vnd.ernie-multi.strokes+json",)
    promise = "strokes and points in order, each within 1/2000 of the side"
    sample = SampleFile(
        SAMPLES / "strokes.json", content_types[0], "a cat, drawn for this package", "Apache-2.0"
    )

    def read(self, data: bytes, content_type: str) -> Drawing:
        value = read_json(data, "strokes")
        if not isinstance(value, dict) or set(value) != {"width", "height", "strokes"}:
            raise InvalidMediaError(
                'strokes must be {"width", "height", "strokes": [[[x…], [y…]]]}', param="data"
            )
        width, height = (read_side(value[name], name) for name in ("width", "height"))
        listed = value["strokes"]
        if not isinstance(listed, list):
            raise InvalidMediaError("strokes must be a list", param="strokes")
        strokes = tuple(_stroke(item, width, height, f"strokes[{n}]") for n, item in enumerate(listed))
        if sum(map(len, strokes)) > MAX_POINTS:
            raise MediaTooLargeError(
                f"{sum(map(len, strokes))} points exceed the limit of {MAX_POINTS}", param="strokes"
            )
        return Drawing(width, height, strokes)

    def write(self, value: Drawing, content_type: str) -> bytes:
        strokes = [[[x for x, _ in stroke], [y for _, y in stroke]] for stroke in value.strokes]
        return json.dumps({"width": value.width, "height": value.height, "strokes": strokes}).encode()

    def to_text(self, value: Drawing) -> str:
        lines = [f"{value.width} {value.height}"]
        for stroke in value.strokes:
            steps, before = [], (0, 0)
            for x, y in stroke:
                here = (round(x / value.width * STEPS), round(y / value.height * STEPS))
                steps.append(f"{here[0] - before[0]} {here[1] - before[1]}")
                before = here
            lines.append(" ".join(steps))
        return "\n".join(lines)

    def from_text(self, text: str) -> Drawing:
        first, *lines = text.split("\n")
        width, height = integers(first, 2, "size of the sheet")
        if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
            raise InvalidInputError(
                f"sheet of {width}x{height} is outside 1 to {MAX_SIDE} a side", param="codes"
            )
        strokes = []
        for number, line in enumerate(lines, 1):
            steps = integers(line, line.count(" ") + 1, f"stroke {number}")
            if len(steps) % 2:
                raise InvalidInputError(f"stroke {number} ends in half a point", param="codes")
            x = y = 0
            points = []
            for right, down in zip(steps[::2], steps[1::2]):
                x, y = x + right, y + down
                if not (0 <= x <= STEPS and 0 <= y <= STEPS):
                    raise InvalidInputError(f"stroke {number} leaves the sheet at {x} {y}", param="codes")
                points.append((x * width / STEPS, y * height / STEPS))
            strokes.append(tuple(points))
        return Drawing(width, height, tuple(strokes))

    def compare(self, original: Drawing, decoded: Drawing) -> Figure:
        name, unit, limit = "largest shift of a point", "of the side", 0.5 / STEPS + 1e-9
        if [len(stroke) for stroke in original.strokes] != [len(stroke) for stroke in decoded.strokes]:
            return Figure(name, math.inf, unit, limit)
        shifts = [
            max(abs(x - u) / original.width, abs(y - v) / original.height)
            for stroke, other in zip(original.strokes, decoded.strokes)
            for (x, y), (u, v) in zip(stroke, other)
        ]
        return Figure(name, max(shifts, default=0.0), unit, limit)


def _stroke(item: Any, width: int, height: int, where: str) -> tuple[tuple[float, float], ...]:
    if not isinstance(item, list) or len(item) != 2 or not all(isinstance(axis, list) for axis in item):
        raise InvalidMediaError(f"{where} must be [[x, …], [y, …]]", param=where)
    xs, ys = ([read_number(number, where) for number in axis] for axis in item)
    if not xs or len(xs) != len(ys):
        raise InvalidMediaError(f"{where} has {len(xs)} x and {len(ys)} y", param=where)
    if min(xs) < 0 or max(xs) > width or min(ys) < 0 or max(ys) > height:
        raise InvalidMediaError(f"{where} leaves the sheet of {width}x{height}", param=where)
    return tuple(zip(xs, ys))
