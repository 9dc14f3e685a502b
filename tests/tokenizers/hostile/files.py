"""Files that no honest sender makes: truncated, patched, with headers that promise more than they hold."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from ernie5.tokenizers.modalities.registry import BUILT_IN

HUGE = 60_000


def samples() -> dict[str, tuple[bytes, str]]:
    """Modality to the content and type of its sample file."""
    return {
        name: (codec.sample.path.read_bytes(), codec.sample.content_type) for name, codec in BUILT_IN.items()
    }


def truncations(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(length, content): the beginnings that fall into the headers, and parts of the whole."""
    size = len(data)
    points = {0, 1, 2, 3, 8, 12, 40, 64, 100, size // 8, size // 4, size // 2, size * 3 // 4, size * 7 // 8}
    points |= {size - 9, size - 2, size - 1}
    for point in sorted(point for point in points if 0 <= point < size):
        yield point, data[:point]


def flips(data: bytes, count: int = 10) -> Iterator[tuple[int, bytes]]:
    """(place, content): one byte of the first 64 inverted."""
    length = min(64, len(data))
    for place in range(0, length, max(1, length // count)):
        yield place, data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def picture_file(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def sound_file(
    samples: np.ndarray, rate: int = 16_000, kind: str = "WAV", subtype: str | None = None
) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, subtype, format=kind)
    return buffer.getvalue()


def corners(height: int = 24, width: int = 32) -> Image.Image:
    """A picture that is another one however it is turned."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 255, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    return Image.fromarray(pixels)


def tone(seconds: float = 0.5, rate: int = 16_000, pitch: float = 440.0) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * pitch * times)).astype(np.float32)


def picture_bombs() -> dict[str, bytes]:
    """Small files whose headers claim a huge picture."""
    whole = corners()
    files = {}
    png = bytearray(picture_file(whole))
    png[16:24] = struct.pack(">II", HUGE, HUGE)
    png[29:33] = struct.pack(">I", zlib.crc32(bytes(png[12:29])))
    files["png"] = bytes(png)
    gif = bytearray(picture_file(whole, "GIF"))
    gif[6:10] = struct.pack("<HH", HUGE, HUGE)
    files["gif"] = bytes(gif)
    bmp = bytearray(picture_file(whole, "BMP"))
    bmp[18:26] = struct.pack("<ii", HUGE, HUGE)
    files["bmp"] = bytes(bmp)
    jpeg = bytearray(picture_file(whole, "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", HUGE, HUGE)
    files["jpeg"] = bytes(jpeg)
    webp = bytearray(picture_file(whole, "WEBP", quality=50))
    at = webp.index(b"\x9d\x01\x2a") + 3
    webp[at : at + 4] = struct.pack("<HH", 0x3FFF, 0x3FFF)
    files["webp"] = bytes(webp)
    tiff = bytearray(picture_file(whole, "TIFF"))
    (directory,) = struct.unpack_from("<I", tiff, 4)
    (entries,) = struct.unpack_from("<H", tiff, directory)
    for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
        if struct.unpack_from("<H", tiff, entry)[0] in (256, 257):
            struct.pack_into("<HII", tiff, entry + 2, 4, 1, HUGE)
    files["tiff"] = bytes(tiff)
    files["ppm"] = b"P6 %d %d 255\n" % (HUGE, HUGE) + bytes(100)
    return files


def array_bomb() -> bytes:
    """An ``.npy`` file that claims 40 GB."""
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000, 100000), }"
    head += b" " * (63 - (10 + len(head)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(64)


def sound_bombs() -> dict[str, bytes]:
    """Small files whose headers promise hours, or that unfold to them."""
    wav = bytearray(sound_file(tone()))
    wav[40:44] = struct.pack("<I", 0x7000_0000)
    flac = bytearray(sound_file(tone(), kind="FLAC"))
    flac[21] |= 0x0F
    flac[22:26] = b"\xff" * 4
    silence = sound_file(np.zeros(660 * 8_000, np.float32), 8_000, "FLAC")
    return {"wav": bytes(wav), "flac": bytes(flac), "unfolding": silence}


def document_bombs() -> dict[str, tuple[str, str | None, bytes]]:
    """Name to (modality, content type, content): structures that are too deep, too large, or never end."""
    entities = "".join(f'<!ENTITY e{level} "{f"&e{level - 1};" * 10}">' for level in range(1, 12))
    laughs = f'<?xml version="1.0"?><!DOCTYPE gpx [<!ENTITY e0 "ha">{entities}]><gpx>&e11;</gpx>'
    file = '<?xml version="1.0"?><!DOCTYPE gpx [<!ENTITY e SYSTEM "file:///etc/passwd">]><gpx>&e;</gpx>'
    vertices = b"ply\nformat ascii 1.0\nelement vertex 2000000000\nproperty float x\nproperty float y\n"
    return {
        "deep boxes": ("boxes", None, b"[" * 200_000),
        "deep strokes": ("strokes", None, b'{"drawing":' + b"[" * 200_000),
        "deep track": ("track", "application/geo+json", b'{"type":' * 100_000),
        "digits": ("boxes", None, b'{"width": ' + b"9" * 100_000 + b"}"),
        "not finite": ("boxes", None, b'{"width": NaN, "height": 1e999, "boxes": []}'),
        "entities": ("track", "application/gpx+xml", laughs.encode()),
        "outside entity": ("track", "application/gpx+xml", file.encode()),
        "branches": ("molecule", None, b"C(" * 100_000),
        "rings": ("molecule", None, b"C%99" * 100_001),
        "columns": ("table", "text/csv", b"," * 500_000),
        "quote": ("table", "text/csv", b'"' + b"a" * 500_000),
        "no bytes of text": ("table", "text/csv", b"a,b\n\x00,\xff\n"),
        "vertices": ("points", "model/ply", vertices + b"property float z\nend_header\n0 0 0\n"),
        "array of points": ("points", "application/x-npy", array_bomb()),
        "array of depths": ("depth", "application/x-npy", array_bomb()),
        "array of series": ("series", "application/x-npy", array_bomb()),
        "protein": ("protein", None, b">x\n" + b"\xf0\x9f\x92\xa9" * 1000),
    }
