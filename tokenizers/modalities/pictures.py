"""Picture files of grey levels, read and written with Pillow, which the vision service has."""

from __future__ import annotations

import importlib
import io
import warnings
from typing import Any

import numpy as np

from ernie5.protocol.errors import InvalidMediaError, MediaTooLargeError

PNG = "image/png"
MAX_PIXELS = 16_000_000


def read_grey(data: bytes, what: str) -> np.ndarray:
    """A PNG's levels ``[H, W]``: uint16 as they are where it has 16 bits, else luminance over white, uint8.

    Raises:
        InvalidMediaError: no PNG, or a damaged one.
        MediaTooLargeError: above ``MAX_PIXELS``, before a pixel is decoded.
    """
    image_module: Any = importlib.import_module("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with image_module.open(io.BytesIO(data), formats=("PNG",)) as picture:
                width, height = picture.size
                if width * height > MAX_PIXELS:
                    raise MediaTooLargeError(
                        f"{what} of {width}x{height} exceeds {MAX_PIXELS} pixels; shrink it", param="data"
                    )
                picture.load()
                if picture.mode.startswith("I"):
                    return np.asarray(picture).astype(np.int64).clip(0, 65535).astype(np.uint16)
                over = image_module.new("RGBA", picture.size, "white")
                over.alpha_composite(picture.convert("RGBA"))
                return np.asarray(over.convert("L"))
    except MediaTooLargeError:
        raise
    except MemoryError:
        raise MediaTooLargeError(f"{what} doesn't fit the memory", param="data") from None
    # Decoders raise nearly any type on damaged data.
    except Exception as error:
        raise InvalidMediaError(
            f"{what} must be a PNG: {error or type(error).__name__}", param="data"
        ) from None


def write_grey(levels: np.ndarray) -> bytes:
    """A PNG of uint8 or uint16 levels ``[H, W]``."""
    image_module: Any = importlib.import_module("PIL.Image")
    file = io.BytesIO()
    image_module.fromarray(levels).save(file, "PNG")
    return file.getvalue()
