"""Small real files for tests of the services."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import soundfile
from PIL import Image


def png(height: int = 28, width: int = 28) -> bytes:
    pixels = np.indices((height, width)).sum(0).astype(np.uint8) * 4
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


def tone(seconds: float = 0.5, subtype: str = "PCM_16", spoil: float | None = None) -> bytes:
    """A WAV file of 16 kHz; ``spoil`` replaces a sample (NaN, infinity)."""
    samples = (0.3 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * 16000)) / 16000)).astype(np.float32)
    if spoil is not None:
        samples[len(samples) // 2] = spoil
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 16000, format="WAV", subtype=subtype)
    return buffer.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_claiming(height: int, width: int) -> bytes:
    """A PNG whose header claims a size that its few bytes don't hold."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + _chunk(b"IEND", b"")
    )


def png_bomb(side: int = 12_000) -> bytes:
    """A valid PNG of a few hundred kilobytes that would unfold to ``side`` squared pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + 3 * side)
    data = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
