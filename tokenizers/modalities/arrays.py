"""Reading NumPy's ``.npy`` files of strangers, and resampling by whole bins: what several codecs share."""

from __future__ import annotations

import io
import math

import numpy as np

from ernie5.protocol.errors import InvalidMediaError

NPY = "application/x-npy"


def read_npy(data: bytes, what: str, dimensions: int) -> np.ndarray:
    """The array of a ``.npy`` file of real numbers as float64, its shape checked before any memory is taken.

    Raises:
        InvalidMediaError: no such file, objects, complex numbers or another number of dimensions.
    """
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version} of the format")
    # The header is a Python literal; a damaged one raises nearly anything.
    except Exception as error:
        raise InvalidMediaError(f"{what}: no .npy file: {error}", param="data") from None
    body = data[file.tell() :]
    if dtype.kind not in "fiu":
        raise InvalidMediaError(f"{what} must hold real numbers, got dtype {dtype}", param="data")
    if len(shape) != dimensions:
        raise InvalidMediaError(f"{what} must have {dimensions} dimensions, got shape {shape}", param="data")
    if min(shape) < 0 or math.prod(shape) * dtype.itemsize != len(body):
        raise InvalidMediaError(
            f"{what} of shape {shape} and {dtype} needs {math.prod(shape) * dtype.itemsize} bytes, "
            f"the file holds {len(body)}",
            param="data",
        )
    array = np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")
    return array.astype(np.float64)


def write_npy(array: np.ndarray) -> bytes:
    """A ``.npy`` file of a numeric array."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
    return file.getvalue()


def check_finite(array: np.ndarray, what: str) -> None:
    """``InvalidMediaError`` with the place of the first NaN or infinity."""
    bad = ~np.isfinite(array)
    if bad.any():
        place = [int(index) for index in np.argwhere(bad)[0]]
        raise InvalidMediaError(f"{what} holds {array[tuple(place)]} at {place}", param="data")


def fitted(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width that fit ``side``, shrunk only where they must be."""
    scale = min(1.0, side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def reduce_bins(image: np.ndarray, height: int, width: int, function: np.ufunc) -> np.ndarray:
    """``[H, W]`` to ``[height, width]`` (neither above H, W): each pixel falls into one bin."""
    rows = np.arange(height) * image.shape[0] // height
    columns = np.arange(width) * image.shape[1] // width
    return function.reduceat(function.reduceat(image, rows, axis=0), columns, axis=1)


def nearest(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """``[h, w]`` to ``[height, width]`` by repeating pixels; undoes :func:`reduce_bins` of constant bins."""
    rows = _bin_of(image.shape[0], height)
    columns = _bin_of(image.shape[1], width)
    return image[rows[:, None], columns]


def _bin_of(bins: int, size: int) -> np.ndarray:
    """The bin of each of ``size`` pixels, as :func:`reduce_bins` splits them."""
    starts = np.arange(bins) * size // bins
    return np.searchsorted(starts, np.arange(size), side="right") - 1


def bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """``[h, w]`` to ``[height, width]``, pixel centres aligned, edges repeated; float64."""
    rows, columns = _weights(image.shape[0], height), _weights(image.shape[1], width)
    return rows @ image @ columns.T


def _weights(source: int, size: int) -> np.ndarray:
    at = np.clip((np.arange(size) + 0.5) * source / size - 0.5, 0, source - 1)
    low = np.minimum(at.astype(np.int64), max(source - 2, 0))
    share = at - low
    weights = np.zeros((size, source))
    weights[np.arange(size), low] = 1 - share
    weights[np.arange(size), np.minimum(low + 1, source - 1)] += share
    return weights
