"""Small ICC profiles (version 2.1), written by the specification ICC.1:2001-04, with known effects."""

from __future__ import annotations

import struct

import numpy as np

# Chromatically adapted to D50, as profiles hold them.
_SRGB = ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141))
_WIDE = ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446))  # of Adobe RGB (1998)
_WIDE_GAMMA = 2.2
_D50 = (0.9642, 1.0, 0.8249)


def wide_rgb() -> bytes:
    """The primaries of Adobe RGB (1998) with gamma 2.2."""
    return _matrix_profile(_WIDE, _WIDE_GAMMA)


def swapped_rgb() -> bytes:
    """About sRGB, but with red and green exchanged."""
    return _matrix_profile((_SRGB[1], _SRGB[0], _SRGB[2]), 2.2)


def linear_grey() -> bytes:
    """Grey whose values are proportional to light."""
    return _profile(b"mntr", b"GRAY", b"XYZ ", [(b"wtpt", _xyz(_D50)), (b"kTRC", _curve(1.0))])


def grey_inks() -> bytes:
    """Four inks: cyan alone is a grey of lightness 50, black is black, the others make no difference."""
    corners = []
    for corner in range(16):  # cyan varies slowest
        cyan, black = corner >> 3 & 1, corner & 1
        lightness = 0 if black else 50 if cyan else 100
        corners.append(bytes([round(lightness * 255 / 100), 128, 128]))
    identity = bytes(range(256))
    unity = struct.pack(">9i", *(65536 if place % 4 == 0 else 0 for place in range(9)))
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + unity + identity * 4 + b"".join(corners) + identity * 3
    tags = [(b"wtpt", _xyz(_D50)), (b"A2B0", table), (b"A2B1", table)]
    return _profile(b"prtr", b"CMYK", b"Lab ", tags)


def wide_to_srgb(colours: np.ndarray) -> np.ndarray:
    """What :func:`wide_rgb` makes of uint8 ``[..., 3]``, in sRGB, by the definitions."""
    light = (colours / 255) ** _WIDE_GAMMA
    linear = light @ np.array(_WIDE) @ np.linalg.inv(np.array(_SRGB))
    return np.rint(255 * srgb_curve(np.clip(linear, 0, 1))).astype(int)


def srgb_curve(light: np.ndarray | float) -> np.ndarray:
    """Light in [0, 1] to sRGB's values in [0, 1] (IEC 61966-2-1)."""
    light = np.asarray(light, float)
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * np.maximum(light, 1e-9) ** (1 / 2.4) - 0.055)


def _matrix_profile(primaries: tuple[tuple[float, float, float], ...], gamma: float) -> bytes:
    curve = _curve(gamma)
    tags = [(b"wtpt", _xyz(_D50))]
    tags += [(name + b"XYZ", _xyz(values)) for name, values in zip((b"r", b"g", b"b"), primaries)]
    tags += [(name + b"TRC", curve) for name in (b"r", b"g", b"b")]
    return _profile(b"mntr", b"RGB ", b"XYZ ", tags)


def _profile(kind: bytes, space: bytes, connection: bytes, tags: list[tuple[bytes, bytes]]) -> bytes:
    name = b"test\0"
    description = b"desc" + bytes(4) + struct.pack(">I", len(name)) + name + bytes(78)
    tags = [(b"desc", description), (b"cprt", b"text" + bytes(4) + b"none\0"), *tags]
    table, body = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for signature, content in tags:
        table += signature + struct.pack(">II", start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    size = start + len(body)
    head = struct.pack(">I4sI4s4s4s", size, bytes(4), 0x02100000, kind, space, connection)
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28) + _numbers(_D50)
    return head.ljust(128, b"\0") + table + body


def _xyz(values: tuple[float, float, float]) -> bytes:
    return b"XYZ " + bytes(4) + _numbers(values)


def _curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def _numbers(values: tuple[float, float, float]) -> bytes:
    return struct.pack(">3i", *(round(value * 65536) for value in values))
