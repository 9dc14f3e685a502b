"""From the bytes of any picture file to the canvas that the tokenizer codes, and back.

Files come from strangers: formats are an allow-list, sizes are checked on the header before a pixel is
decoded, and whatever a decoder raises becomes :class:`InvalidMediaError`.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from ernie5.protocol.errors import InvalidMediaError, MediaTooLargeError
from ernie5.protocol.grids import GRIDS
from ernie5.protocol.tokens import ResizePad
from ernie5.tokenizers.vision.colour import to_srgb
from ernie5.tokenizers.vision.model import STRIDE

# Formats whose decoders run no program and follow no link.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO")
# A picture within 32 or 48 pixels keeps its pixels on the small square grids; larger ones share grids of at
# most 64 cells.
SMALL_GRIDS = ((4, 4), (6, 6))
LARGE_GRIDS = tuple(grid for grid in GRIDS if grid not in SMALL_GRIDS and grid[0] * grid[1] <= 64)
DECODED_SIDE_LIMIT = 512


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a picture file may hold: bytes, pixels and the longer side in pixels."""

    max_bytes: int = 50 * 1024 * 1024
    max_pixels: int = 64_000_000
    max_side: int = 16_384

    def check_size(self, width: int, height: int) -> None:
        """Raise ``MediaTooLargeError`` where a picture of this size is above a limit."""
        if width < 1 or height < 1:
            raise InvalidMediaError(f"picture is empty: {width}x{height} pixels")
        if max(width, height) > self.max_side:
            raise MediaTooLargeError(
                f"picture of {width}x{height} pixels is longer than {self.max_side} a side; shrink it first"
            )
        if width * height > self.max_pixels:
            raise MediaTooLargeError(
                f"picture of {width}x{height} = {width * height} pixels is above the limit of "
                f"{self.max_pixels}; shrink it first"
            )


def open_image(source: bytes | Image.Image, limits: ImageLimits | None = None) -> Image.Image:
    """Decode a picture to upright sRGB: first frame, EXIF orientation and colour profile applied,
    transparency over white.

    Args:
        source: the bytes of a file in one of :data:`FORMATS`, or a Pillow picture.
        limits: size limits; the defaults of :class:`ImageLimits` if None.

    Raises:
        InvalidMediaError: empty, truncated, unknown or damaged data, or values that are not finite.
        MediaTooLargeError: above a limit, before any pixel is decoded.
    """
    limits = limits or ImageLimits()
    try:
        if isinstance(source, Image.Image):
            limits.check_size(*source.size)
            return _finish(source)
        if not source:
            raise InvalidMediaError("picture is empty: 0 bytes")
        if len(source) > limits.max_bytes:
            raise MediaTooLargeError(
                f"picture of {len(source)} bytes is above the limit of {limits.max_bytes} bytes"
            )
        with Image.open(io.BytesIO(source), formats=FORMATS) as picture:
            limits.check_size(*picture.size)
            picture.load()
            limits.check_size(*picture.size)  # an icon file names its size only once loaded
            return _finish(picture)
    except (InvalidMediaError, MediaTooLargeError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaTooLargeError(f"picture is too large: {error}") from None
    except MemoryError:
        raise MediaTooLargeError("picture does not fit the memory; shrink it first") from None
    except Image.UnidentifiedImageError:
        raise InvalidMediaError(f"data is no picture in a known format ({', '.join(FORMATS)})") from None
    # Decoders raise nearly any type on damaged data (OSError, SyntaxError, struct.error, IndexError, …).
    except Exception as error:
        raise InvalidMediaError(f"picture can't be decoded: {error or type(error).__name__}") from error


def choose_grid(height: int, width: int) -> tuple[int, int]:
    """The final grid for a picture of this size: small ones unscaled, others by the nearest aspect ratio.

    >>> choose_grid(28, 28), choose_grid(40, 10), choose_grid(600, 800), choose_grid(64, 64)
    ((4, 4), (6, 6), (6, 8), (8, 8))
    """
    for grid in SMALL_GRIDS:
        if height <= grid[0] * STRIDE and width <= grid[1] * STRIDE:
            return grid
    aspect = math.log(height / width)
    return min(LARGE_GRIDS, key=lambda grid: abs(math.log(grid[0] / grid[1]) - aspect))


def fit_to_canvas(picture: Image.Image, grid: tuple[int, int] | None = None) -> tuple[np.ndarray, ResizePad]:
    """Shrink an RGB picture if need be and centre it on the canvas of ``grid`` (the best one if None).

    The padding takes the median colour of the picture's border, so that it makes no edge: a digit on black
    stays on black, a flattened emoji on white.

    Returns:
        uint8 ``[H, W, 3]`` of 8 pixels a cell, and the transform that :func:`restore` undoes.
    """
    width, height = picture.size
    grid = grid or choose_grid(height, width)
    canvas_height, canvas_width = grid[0] * STRIDE, grid[1] * STRIDE
    scale = min(1.0, canvas_height / height, canvas_width / width)
    fitted_height = min(canvas_height, max(1, round(height * scale)))
    fitted_width = min(canvas_width, max(1, round(width * scale)))
    if (fitted_width, fitted_height) != picture.size:
        picture = picture.resize((fitted_width, fitted_height), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.uint8)
    top, left = (canvas_height - fitted_height) // 2, (canvas_width - fitted_width) // 2
    canvas = np.empty((canvas_height, canvas_width, 3), np.uint8)
    canvas[:] = _border_colour(pixels)
    canvas[top : top + fitted_height, left : left + fitted_width] = pixels
    transform = ResizePad(height, width, fitted_height, fitted_width, top, left, canvas_height, canvas_width)
    return canvas, transform


def restore(canvas: np.ndarray, transform: ResizePad | None) -> Image.Image:
    """Crop the padding of a uint8 ``[H, W, 3]`` canvas and resize back, to at most 512 pixels a side.

    Without a transform (a generated picture) the canvas is the picture.

    Raises:
        InvalidMediaError: the transform belongs to a canvas of another size.
    """
    if transform is None:
        return Image.fromarray(canvas)
    if canvas.shape[:2] != (transform.canvas_height, transform.canvas_width):
        raise InvalidMediaError(
            f"transform is for a canvas of {transform.canvas_height}x{transform.canvas_width} pixels, "
            f"the codes hold {canvas.shape[0]}x{canvas.shape[1]}"
        )
    rows = slice(transform.top, transform.top + transform.height)
    columns = slice(transform.left, transform.left + transform.width)
    picture = Image.fromarray(canvas[rows, columns])
    scale = min(1.0, DECODED_SIDE_LIMIT / max(transform.source_height, transform.source_width))
    size = (max(1, round(transform.source_width * scale)), max(1, round(transform.source_height * scale)))
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)


def _finish(picture: Image.Image) -> Image.Image:
    try:
        picture = ImageOps.exif_transpose(picture)
    except Exception:  # damaged EXIF data: the pixels are still good
        picture = picture.copy()
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        picture = _from_wide_values(picture)
    picture = to_srgb(picture)
    if picture.mode == "RGBA":
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture).convert("RGB")
    return picture


def _from_wide_values(picture: Image.Image) -> Image.Image:
    """Wide grey to 8 bits, the profile kept: integers are 16-bit values, floats [0, 1] or, where any is above
    1, [0, 255].
    """
    values = np.asarray(picture)
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise InvalidMediaError("picture holds values that are not finite (NaN or infinity)")
        scaled = values * (255.0 if values.max(initial=0) <= 1 else 1.0)
    else:
        scaled = values / 257.0
    grey = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
    narrow = Image.fromarray(grey)
    narrow.info = {key: value for key, value in picture.info.items() if key == "icc_profile"}
    return narrow


def _border_colour(pixels: np.ndarray) -> np.ndarray:
    edges = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
    return np.median(np.concatenate(edges), axis=0).astype(np.uint8)
