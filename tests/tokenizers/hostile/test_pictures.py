"""Odd pictures through the vision tokenizer; orientation, transparency and colour profiles are honoured."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from ernie5.tokenizers.vision.preprocessing import open_image
from tests.tokenizers.hostile import profiles
from tests.tokenizers.hostile.files import corners, picture_file
from tests.tokenizers.hostile.worker import Reply

Tokenise = Callable[..., Reply]
ORIENTATION = 0x0112
# What the eight values of the tag do to an upright picture; the inverse is what a camera stores.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def as_stored(picture: Image.Image, orientation: int) -> Image.Image:
    how = STORED[orientation]
    return picture if how is None else picture.transpose(how)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(open_image(data)).astype(int)


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_every_orientation_of_every_format_is_turned_upright(kind: str, orientation: int) -> None:
    options = {"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    stored = as_stored(corners(), orientation)
    shown = pixels(picture_file(stored, kind, exif=exif_of(orientation), **options))
    assert shown.shape == (24, 32, 3)
    expected = np.asarray(corners()).astype(int)
    if kind == "JPEG":  # which blurs colours at edges
        shown, expected = shown[6::12, 8::16], expected[6::12, 8::16]
    assert np.abs(shown - expected).max() <= (8 if kind == "JPEG" else 0)


def test_a_turned_picture_has_the_codes_of_the_upright_one(tokenise: Tokenise) -> None:
    upright = tokenise("image", picture_file(corners()))
    for orientation in STORED:
        stored = picture_file(as_stored(corners(), orientation), exif=exif_of(orientation))
        assert tokenise("image", stored).codes == upright.codes
    assert tokenise("image", picture_file(ImageOps.flip(corners()))).codes != upright.codes


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_is_none_is_no_reason_to_refuse(orientation: int) -> None:
    shown = pixels(picture_file(corners(), exif=exif_of(orientation)))
    assert np.array_equal(shown, np.asarray(corners()))


def test_numbers_of_a_wide_space_become_srgb() -> None:
    colours = np.array([[[200, 60, 60], [60, 200, 60], [128, 128, 128], [255, 255, 255]]], np.uint8)
    shown = pixels(picture_file(Image.fromarray(colours), icc_profile=profiles.wide_rgb()))
    expected = profiles.wide_to_srgb(colours)
    assert np.abs(shown - expected).max() <= 2
    assert np.abs(shown - colours.astype(int)).max() > 10  # the profile mattered
    assert np.ptp(shown[0, 2]) <= 1 and (shown[0, 3] >= 254).all()  # grey stays grey, white white


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_profiles_of_every_format_are_honoured(kind: str) -> None:
    red = Image.new("RGB", (16, 16), (255, 0, 0))
    shown = pixels(picture_file(red, kind, icc_profile=profiles.swapped_rgb()))[8, 8]
    assert shown[1] > 200 > 60 > shown[0]  # its red and green are exchanged


def test_transparency_is_left_alone_by_a_profile() -> None:
    sprite = np.zeros((8, 8, 4), np.uint8)
    sprite[:, :4] = (255, 0, 0, 255)
    sprite[:, 4:] = (255, 0, 0, 0)
    shown = pixels(picture_file(Image.fromarray(sprite), icc_profile=profiles.swapped_rgb()))
    assert shown[4, 1, 1] > 200 > 60 > shown[4, 1, 0]
    assert (shown[:, 4:] == 255).all()
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.putpixel((1, 1), 1)
    shown = pixels(picture_file(palette, transparency=0, icc_profile=profiles.swapped_rgb()))
    assert shown[0, 0].tolist() == [255, 255, 255] and shown[1, 1, 1] > 200 > 60 > shown[1, 1, 0]


def test_grey_profiles_are_honoured_in_8_and_16_bits() -> None:
    grey = np.full((4, 4), 128, np.uint8)
    expected = round(255 * profiles.srgb_curve((128 / 255) ** 1.0))  # the profile is linear: lighter in sRGB
    for picture in (Image.fromarray(grey), Image.fromarray(grey.astype(np.uint16) * 257)):
        shown = pixels(picture_file(picture, icc_profile=profiles.linear_grey()))
        assert np.abs(shown - expected).max() <= 2, shown[0, 0]
    with_alpha = Image.merge("LA", [Image.fromarray(grey), Image.new("L", (4, 4), 255)])
    assert np.abs(pixels(picture_file(with_alpha, icc_profile=profiles.linear_grey())) - expected).max() <= 2


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_inks_are_what_their_profile_says(kind: str) -> None:
    cyan = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    profile = profiles.grey_inks()
    options = {"quality": 95} if kind == "JPEG" else {}
    shown = pixels(picture_file(cyan, kind, icc_profile=profile, **options))[8, 8]
    # By this profile cyan ink is a middle grey of lightness 50, which is 119 in sRGB.
    assert np.abs(shown - 119).max() <= 6, shown
    plain = pixels(picture_file(cyan, kind, **options))[8, 8]
    assert plain[2] - plain[0] > 100  # without it, cyan


def test_srgb_changes_no_pixel_and_no_code(tokenise: Tokenise) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    ramp = np.arange(48 * 48 * 3, dtype=np.uint32).reshape(48, 48, 3) * 2654435761 >> 24
    picture = Image.fromarray(ramp.astype(np.uint8))
    with_profile, without = picture_file(picture, icc_profile=profile), picture_file(picture)
    assert np.array_equal(pixels(with_profile), pixels(without))
    assert tokenise("image", with_profile).codes == tokenise("image", without).codes


def test_a_damaged_or_foreign_profile_leaves_the_pixels_as_they_are() -> None:
    good = profiles.swapped_rgb()
    lies = [b"x", b"\0" * 128, good[:100], good[:-20], b"\xff" * 3000, good[:132] + b"\xff" * 200]
    lies += [profiles.grey_inks(), profiles.linear_grey()]  # of other spaces
    expected = np.asarray(corners())
    for profile in lies:
        assert np.array_equal(pixels(picture_file(corners(), icc_profile=profile)), expected)
    large = good + bytes(5 << 20)
    assert np.array_equal(pixels(picture_file(corners(), "WEBP", lossless=True, icc_profile=large)), expected)


def test_profiles_with_any_byte_inverted_never_refuse_a_picture() -> None:
    good = profiles.wide_rgb()
    for place in range(0, len(good), 9):
        damaged = good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :]
        data = picture_file(Image.new("RGB", (2, 2), (9, 200, 40)), icc_profile=damaged)
        assert pixels(data).shape == (2, 2, 3)


def test_colours_are_the_same_in_every_thread() -> None:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 40, 3), np.uint8))
    data = picture_file(noise, icc_profile=profiles.wide_rgb())
    expected = pixels(data)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(shown, expected) for shown in pool.map(pixels, [data] * 16))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_modes_are_tokenised(tokenise: Tokenise, mode: str) -> None:
    picture = Image.new(mode, (40, 30))
    kind = "TIFF" if mode in ("CMYK", "F", "I;16") else "PNG"
    assert tokenise("image", picture_file(picture, kind)).outcome == "tokens"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_moving_pictures_the_first_is_tokenised(tokenise: Tokenise, kind: str) -> None:
    frames = [corners(), ImageOps.flip(corners()), ImageOps.mirror(corners())]
    options = {"lossless": True} if kind == "WEBP" else {}
    moving = picture_file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    first = tokenise("image", picture_file(corners()))
    assert tokenise("image", moving).codes == first.codes


@pytest.mark.parametrize("size", [(1, 1), (1, 16_384), (16_384, 1), (3, 500), (1000, 999)])
def test_any_shape_is_tokenised(tokenise: Tokenise, size: tuple[int, int]) -> None:
    assert tokenise("image", picture_file(Image.new("RGB", size, "teal"))).outcome == "tokens"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_are_refused(tokenise: Tokenise, value: float) -> None:
    values = np.full((8, 8), value, np.float32)
    assert "finite" in tokenise("image", picture_file(Image.fromarray(values), "TIFF")).message
