"""Picture files from strangers: every odd one is read rightly or refused with a reason."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ernie5.protocol.errors import InvalidMediaError, MediaTooLargeError
from ernie5.protocol.tokens import ResizePad
from ernie5.tokenizers.vision.preprocessing import (
    LARGE_GRIDS,
    ImageLimits,
    choose_grid,
    fit_to_canvas,
    open_image,
    restore,
)

# Decoders warn about the damage that these tests do on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def file_of(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(height=40, width=50):
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        np.stack([rows * 5 % 256, columns * 5 % 256, (rows + columns) % 256], -1).astype(np.uint8)
    )


def bomb_header(width, height):
    """A PNG of a few bytes that claims a huge size."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_truncated_files_are_refused_or_whole(kind):
    data = file_of(gradient(), kind)
    whole = np.asarray(open_image(data))
    for length in (0, 1, 8, 64, len(data) // 2):
        with pytest.raises(InvalidMediaError):
            open_image(data[:length])
    try:  # the last byte may be a trailer; then the picture has to be the whole one
        shortened = open_image(data[:-1])
    except InvalidMediaError:
        pass
    else:
        assert np.abs(np.asarray(shortened).astype(int) - whole).max() <= (16 if kind == "BMP" else 2)


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_garbage_is_refused(data):
    with pytest.raises(InvalidMediaError):
        open_image(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "ICO"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_damaged_files_never_crash(kind, seed):
    data = bytearray(file_of(gradient(), kind))
    random = np.random.default_rng(seed)
    for position in random.integers(0, len(data), 8):
        data[position] = random.integers(256)
    try:
        picture = open_image(bytes(data), ImageLimits(max_pixels=1_000_000))
    except (InvalidMediaError, MediaTooLargeError):
        return
    assert picture.mode == "RGB"


@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (20_000, 1), (1, 20_000), (9_000, 9_000)])
def test_bombs_are_refused_by_their_header(width, height):
    with pytest.raises(MediaTooLargeError, match=r"limit|longer|large|exceeds"):
        open_image(bomb_header(width, height))


def test_large_pillow_pictures_and_files_are_refused():
    with pytest.raises(MediaTooLargeError, match="20000"):
        open_image(Image.new("L", (20_000, 1)))
    with pytest.raises(MediaTooLargeError, match="bytes"):
        open_image(file_of(gradient()), ImageLimits(max_bytes=100))


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"]
)
def test_every_mode_of_pillow_becomes_rgb(mode):
    picture = open_image(Image.new(mode, (9, 7)))
    assert picture.mode == "RGB" and picture.size == (9, 7)


def test_unknown_formats_are_refused():
    with pytest.raises(InvalidMediaError, match="PNG, JPEG"):
        open_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")


def test_transparency_lies_over_white():
    sprite = np.zeros((8, 8, 4), np.uint8)
    sprite[:, 4:] = (255, 0, 0, 255)
    sprite[:, 2:4] = (0, 0, 0, 128)
    pixels = np.asarray(open_image(file_of(Image.fromarray(sprite))))
    assert (pixels[:, :2] == 255).all() and (pixels[:, 4:] == (255, 0, 0)).all()
    assert np.abs(pixels[:, 2:4].astype(int) - 127).max() <= 1
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 0, 0, 255])
    palette.putpixel((1, 1), 1)
    pixels = np.asarray(open_image(file_of(palette, transparency=0)))
    assert tuple(pixels[0, 0]) == (255, 255, 255) and tuple(pixels[1, 1]) == (0, 0, 255)
    grey = np.asarray(open_image(file_of(Image.fromarray(np.array([[[0, 0], [0, 255]]], np.uint8), "LA"))))
    assert grey[0].tolist() == [[255] * 3, [0] * 3]


def test_wide_values_become_8_bit():
    values = np.array([[0, 257 * 100, 65535]], np.uint16)
    assert np.asarray(open_image(file_of(Image.fromarray(values))))[0, :, 0].tolist() == [0, 100, 255]
    tiff = file_of(Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32)), "TIFF")
    assert np.asarray(open_image(tiff))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value):
    values = np.full((4, 4), 0.5, np.float32)
    values[2, 2] = value
    with pytest.raises(InvalidMediaError, match="finite"):
        open_image(file_of(Image.fromarray(values), "TIFF"))


def test_cmyk_animation_and_orientation():
    cmyk = open_image(file_of(gradient().convert("CMYK"), "JPEG", quality=95))
    assert cmyk.mode == "RGB" and cmyk.size == (50, 40)
    frames = [Image.new("RGB", (10, 10), colour) for colour in ("red", "blue")]
    moving = open_image(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert np.asarray(moving)[5, 5].tolist() == [255, 0, 0]
    exif = Image.Exif()
    exif[0x0112] = 6  # turned a quarter
    assert open_image(file_of(gradient(), "JPEG", exif=exif)).size == (40, 50)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((28, 28), (4, 4)),
        ((1, 1), (4, 4)),
        ((33, 10), (6, 6)),
        ((50, 50), (8, 8)),
        ((1000, 1000), (8, 8)),
        ((480, 640), (6, 8)),
        ((640, 480), (8, 6)),
        ((100, 165), (6, 10)),
        ((100, 200), (4, 8)),
        ((1, 16_384), (4, 16)),
        ((16_384, 1), (16, 4)),
    ],
)
def test_grid_follows_size_and_aspect(size, grid):
    assert choose_grid(*size) == grid


@given(st.integers(1, 700), st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_fitting_is_undone(height, width):
    picture = gradient(height, width)
    canvas, transform = fit_to_canvas(picture)
    grid = (canvas.shape[0] // 8, canvas.shape[1] // 8)
    assert grid in ((4, 4), (6, 6), *LARGE_GRIDS) and canvas.shape[0] * canvas.shape[1] <= 64 * 64
    back = restore(canvas, transform)
    scale = min(1, 512 / max(height, width))
    assert back.size == (max(1, round(width * scale)), max(1, round(height * scale)))
    if (transform.height, transform.width) == (height, width):
        np.testing.assert_array_equal(np.asarray(back), np.asarray(picture))


def test_padding_takes_the_colour_of_the_border():
    digit = np.zeros((28, 28, 3), np.uint8)
    digit[10:18, 10:18] = 255
    canvas, transform = fit_to_canvas(Image.fromarray(digit))
    assert transform == ResizePad(28, 28, 28, 28, 2, 2, 32, 32)
    assert (canvas[:2] == 0).all() and (canvas[:, -2:] == 0).all()
    canvas, _ = fit_to_canvas(Image.new("RGB", (60, 20), (9, 80, 200)))
    assert (canvas == (9, 80, 200)).all()


def test_a_foreign_transform_is_refused():
    with pytest.raises(InvalidMediaError, match="canvas of 32x32"):
        restore(np.zeros((64, 64, 3), np.uint8), ResizePad(28, 28, 28, 28, 2, 2, 32, 32))
