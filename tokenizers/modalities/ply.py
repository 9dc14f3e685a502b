"""PLY files of points: ASCII and both binary forms are read, binary little-endian is written."""

from __future__ import annotations

import numpy as np

from ernie5.protocol.errors import InvalidMediaError

PLY = "model/ply"

_TYPES = {
    **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("uchar", "uint8"), "u1"),
    **dict.fromkeys(("short", "int16"), "i2"),
    **dict.fromkeys(("ushort", "uint16"), "u2"),
    **dict.fromkeys(("int", "int32"), "i4"),
    **dict.fromkeys(("uint", "uint32"), "u4"),
    **dict.fromkeys(("float", "float32"), "f4"),
    **dict.fromkeys(("double", "float64"), "f8"),
}
_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
_MAX_HEADER = 16_384


def read_ply(data: bytes) -> np.ndarray:
    """x, y, z of the element ``vertex``, float64 ``[n, 3]``; all else is passed over.

    Raises:
        InvalidMediaError: no PLY file, vertices that come not first or with lists, or too few bytes for them.
    """
    end = data.find(b"end_header", 0, _MAX_HEADER)
    start = data.find(b"\n", end) + 1
    if not data.startswith(b"ply") or end < 0 or not start:
        raise InvalidMediaError(
            "no PLY file: it begins with 'ply' and a header up to 'end_header'", param="data"
        )
    order, count, properties = _header(data[:end].decode("latin-1").splitlines())
    names = [name for name, _ in properties]
    if not {"x", "y", "z"} <= set(names) or len(set(names)) < len(names):
        raise InvalidMediaError(f"vertices need properties x, y and z once each, got {names}", param="data")
    columns = [names.index(axis) for axis in "xyz"]
    if order:
        dtype = np.dtype([(name, order + kind) for name, kind in properties])
        if count * dtype.itemsize > len(data) - start:
            raise InvalidMediaError(
                f"{count} vertices of {dtype.itemsize} bytes don't fit the {len(data) - start} there are",
                param="data",
            )
        table = np.frombuffer(data, dtype, count, start)
        return np.stack([table[axis].astype(np.float64) for axis in "xyz"], axis=1)
    lines = data[start:].split(b"\n", count)[:count]
    if len(lines) < count or (count and not lines[-1].strip()):
        raise InvalidMediaError(f"the header tells of {count} vertices, there are fewer lines", param="data")
    points = np.empty((count, 3))
    for number, line in enumerate(lines):
        words = line.split()
        try:
            if len(words) != len(names):
                raise ValueError(f"{len(words)} numbers for {len(names)} properties")
            points[number] = [float(words[column]) for column in columns]
        except ValueError as error:
            raise InvalidMediaError(f"vertex {number}: {error}", param="data") from None
    return points


def write_ply(points: np.ndarray) -> bytes:
    """A binary file of ``[n, 3]`` points as float32."""
    head = (
        "ply\nformat binary_little_endian 1.0\n"
        f"element vertex {len(points)}\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
    )
    return head.encode() + points.astype("<f4").tobytes()


def _header(lines: list[str]) -> tuple[str, int, list[tuple[str, str]]]:
    """Byte order, number of vertices, and their properties as (name, type)."""
    order, element, count = None, "", 0
    properties: list[tuple[str, str]] = []
    for line in lines[1:]:
        words = line.split()
        if not words or words[0] in ("comment", "obj_info"):
            continue
        if words[0] == "format" and len(words) == 3 and words[1] in _ORDERS:
            order = _ORDERS[words[1]]
        elif words[0] == "element" and len(words) == 3 and words[2].isdecimal() and len(words[2]) < 10:
            if not element and words[1] != "vertex":
                raise InvalidMediaError(f"element vertex must come first, not {words[1]!r:.40}", param="data")
            element = words[1]
            count = int(words[2]) if element == "vertex" else count
        elif words[0] == "property" and element:
            if element != "vertex":
                continue
            if len(words) != 3 or words[1] not in _TYPES:
                raise InvalidMediaError(f"vertices can't have {line[:60]!r}", param="data")
            properties.append((words[2], _TYPES[words[1]]))
        else:
            raise InvalidMediaError(f"PLY header: {line[:60]!r} is not understood", param="data")
    if order is None or not element:
        raise InvalidMediaError("the PLY header names no format or no vertices", param="data")
    return order, count, properties
