"""Features for understanding, in the shape that the base tokenizer's encoders have.

The backbone expects, with every picture or sound to be understood, the features of the service's encoders. A
codec of fixed form has no network, so its features are its values before quantisation, in the first places of
each vector, zeros behind them. The begin marker tells the model which modality they are of.
"""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie5.protocol.samples import Segment

# Name of an encoder -> (K, D) of its features [N, K, D].
Shapes = Mapping[str, tuple[int, int]]

# By the tokenizer's hash, which fixes them.
_shapes: dict[tuple[str, str], Shapes] = {}


def encoder_shapes(base: Any, modality: str) -> Shapes:
    """Shapes of the features that ``base`` gives with ``image`` or ``speech``, found on a blank medium."""
    key = (base.hash, modality)
    if key not in _shapes:
        blank = Segment(modality=modality, data=_blank_png() if modality == "image" else _blank_wav())
        (span,) = base.encode_segments([blank], features=True)
        if isinstance(span, ErnieMultiError):
            raise span
        _shapes[key] = {name: (values.shape[1], values.shape[2]) for name, values in span.features.items()}
    return _shapes[key]


def fill(values: np.ndarray, shapes: Shapes) -> dict[str, np.ndarray]:
    """``[N, K, d]`` as float16 ``[N, K, D]`` for each encoder; K values are regrouped where it has another K.

    Raises:
        InvalidInputError: an encoder's features are too narrow.
    """
    filled = {}
    for name, (groups, width) in shapes.items():
        grouped = values.reshape(len(values), groups, -1) if values[0].size % groups == 0 else None
        if grouped is None or grouped.shape[2] > width:
            raise InvalidInputError(
                f"{values.shape[1:]} values don't fit {name!r} features of {groups}x{width}"
            )
        out = np.zeros((len(values), groups, width), np.float16)
        out[:, :, : grouped.shape[2]] = grouped
        filled[name] = out
    return filled


def _blank_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 32, 32, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(33) * 32)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _blank_wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        out.writeframes(bytes(2 * 1_600))
    return file.getvalue()
