"""3-D point clouds: PLY or ``.npy`` ``[n, 3]`` in and out, as a grid of 16 x 16 x 16 voxels.

A cell at (row, column) of the 16 x 16 grid holds a column of 16 voxels along z, one bit each, x along columns
and y along rows. Coarser scales hold the same with voxels joined in x and y. The first two scales hold the
edge of a voxel (float32) and the place of the grid in voxels (three int16), so that points come back in their
own frame: the centre of every voxel that held one, in no order. Each is within half a voxel's diagonal of a
point of the source, and the other way round: 5.8 % of the longest side of the cloud. Colours and normals are
not kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.tokens import TokenSpan
from ernie5.tokenizers.modalities.arrays import NPY, check_finite, read_npy, reduce_bins, write_npy
from ernie5.tokenizers.modalities.cells import (
    HEADER_SCALES,
    SCHEDULE,
    SIDE,
    float_halves,
    from_halves,
    header,
    make_span,
    pack,
    read_header,
    read_scales,
    unpack,
)
from ernie5.tokenizers.modalities.codec import SAMPLES, Codec, Figure, SampleFile
from ernie5.tokenizers.modalities.ply import PLY, read_ply, write_ply

MAX_POINTS = 1_000_000
_LEAST = 1e-29  # edge of a voxel
_FAR = 32_700  # voxels from the origin that an int16 holds, with room for the grid
BOUND = math.sqrt(3) / 2 / (SIDE - 1) * (1 + 1e-6)  # of the longest side


class PointsCodec(Codec[np.ndarray]):
    """Points, float64 ``[n, 3]``."""

    modality = MODALITIES["points"]
    content_types = (PLY, NPY)
    promise = "points and voxel centres within 5.8 % of the longest side of each other"
    sample = SampleFile(
        SAMPLES / "points.ply",
        PLY,
        "400 points of terrain at the Jacksboro fault, in metres: SRTM (USGS), from matplotlib 3.11.2",
        "public domain",
    )

    def read(self, data: bytes, content_type: str) -> np.ndarray:
        points = read_npy(data, "a point cloud", 2) if content_type == NPY else read_ply(data)
        if points.shape[1] != 3:
            raise InvalidMediaError(
                f"points have 3 coordinates, got an array of {points.shape}", param="data"
            )
        if not len(points):
            raise InvalidMediaError("the cloud has no points", param="data")
        if len(points) > MAX_POINTS:
            raise MediaTooLargeError(f"{len(points)} points exceed the limit of {MAX_POINTS}", param="data")
        check_finite(points, "the cloud")
        return points

    def write(self, value: np.ndarray, content_type: str) -> bytes:
        return write_npy(value) if content_type == NPY else write_ply(value)

    def encode(self, value: np.ndarray, base: Any, *, features: bool = False) -> TokenSpan:
        edge = _edge(value)
        voxels = np.floor(value / edge).astype(np.int64)
        corner = voxels.min(axis=0)
        x, y, z = (voxels - corner).T
        filled = np.zeros((SIDE, SIDE, SIDE), bool)  # y, x, z
        filled[y, x, z] = True
        scales = header([*float_halves(edge), *(int(place) & 0xFFFF for place in corner)])
        for rows, columns in SCHEDULE[HEADER_SCALES:]:
            layers = [reduce_bins(filled[..., z], rows, columns, np.logical_or) for z in range(SIDE)]
            scales.append(pack(np.stack(layers, axis=-1), 1))
        return make_span(self.modality.name, scales, base, values=filled * 2.0 - 1.0 if features else None)

    def decode(self, span: TokenSpan, base: Any) -> np.ndarray:
        """Centres of the filled voxels, float64 ``[n, 3]``."""
        self.check_span(span, base)
        scales, _ = read_scales(span)
        upper, lower, *places = read_header(scales)
        edge = from_halves(upper, lower)
        if edge <= 0:
            raise InvalidInputError(f"voxels with an edge of {edge} are impossible", param="codes")
        corner = np.array(places, np.uint16).view(np.int16).astype(np.float64)
        y, x, z = np.nonzero(unpack(scales[-1], 1))
        if not len(x):
            raise InvalidInputError("the tokens fill no voxel", param="codes")
        return (np.stack((x, y, z), axis=1) + corner + 0.5) * edge

    def compare(self, original: np.ndarray, decoded: np.ndarray) -> Figure:
        side = float(np.ptp(original, axis=0).max())
        farthest = max(nearest_distances(original, decoded).max(), nearest_distances(decoded, original).max())
        return Figure(
            "largest distance to the nearest point", float(farthest) / (side or 1.0), "of the side", BOUND
        )


def nearest_distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Distance of each point to the nearest of ``others``, ``[n]``."""
    return np.concatenate(
        [
            np.sqrt(((part[:, None] - others) ** 2).sum(axis=2).min(axis=1))
            for part in np.array_split(points, max(1, len(points) * len(others) // 1_000_000))
        ]
    )


def _edge(points: np.ndarray) -> float:
    """Edge of a voxel: 15 hold the longest side, since the first one may begin before the cloud."""
    with np.errstate(over="ignore"):
        side, far = float(np.ptp(points, axis=0).max()), float(np.abs(points).max())
    edge = side / (SIDE - 1) if side > 0 else max(far / _FAR, _LEAST)
    # A float32 not below it; the factor keeps the outermost point inside after division.
    edge = float(np.nextafter(np.float32(edge * (1 + 2**-22)), np.float32(np.inf)))
    if not 1e-30 < edge < 1e30:
        raise InvalidMediaError(f"a cloud with a side of {side:.6g} can't be told; scale it", param="data")
    if far / edge > _FAR + 1:
        raise InvalidMediaError(
            f"the cloud lies {far:.6g} from the origin, with a side of {side:.6g}; move it nearer first",
            param="data",
        )
    return edge
