"""Codecs on the scales and codebooks layouts: bounds of the error, and refusals.

They need the width of the base tokenizer's codes only; `test_samples.py` runs them on the real ones.
"""

from __future__ import annotations

import io
import zlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from ernie5.protocol.errors import InvalidInputError, MediaTooLargeError
from ernie5.protocol.tokens import CodebooksLayout, ScalesLayout, TokenSpan
from ernie5.tokenizers.modalities import depth as depth_module
from ernie5.tokenizers.modalities.arrays import NPY, bilinear, nearest, reduce_bins, write_npy
from ernie5.tokenizers.modalities.cells import SCHEDULE
from ernie5.tokenizers.modalities.depth import DepthCodec
from ernie5.tokenizers.modalities.pictures import PNG
from ernie5.tokenizers.modalities.ply import PLY, read_ply, write_ply
from ernie5.tokenizers.modalities.points import BOUND, PointsCodec, nearest_distances
from ernie5.tokenizers.modalities.series import Series, SeriesCodec, error_bound
from ernie5.tokenizers.modalities.sketch import SketchCodec

VISION = SimpleNamespace(bits=16, hash="ab")
AUDIO = SimpleNamespace(levels=8, hash="cd", codec=SimpleNamespace(config=SimpleNamespace(codebook_size=256)))
DEPTH, POINTS, SERIES, SKETCH = DepthCodec(), PointsCodec(), SeriesCodec(), SketchCodec()

finite = st.floats(-1e9, 1e9)


@st.composite
def series(draw: st.DrawFn) -> Series:
    shape = draw(st.tuples(st.integers(1, 20), st.integers(1, 4)))
    return Series(draw(hnp.arrays(np.float64, shape, elements=finite)), draw(st.floats(1e-6, 1e6)))


@given(series(), st.integers(3, 8))
@example(Series(np.array([[2.22507386e-309]])), 3)  # below the smallest normal number
def test_samples_of_a_series_stay_within_the_bound_of_the_levels_kept(value: Series, levels: int) -> None:
    span = SERIES.encode(value, AUDIO)
    layout = span.layout
    assert isinstance(layout, CodebooksLayout)
    kept = CodebooksLayout(
        256, levels, layout.frame_rate, layout.sample_rate, layout.samples, layout.channels
    )
    cut = TokenSpan("series", kept, np.ascontiguousarray(span.codes[:, :levels]), span.tokenizer)
    decoded = SERIES.decode(cut, AUDIO)
    assert decoded.values.shape == value.values.shape and decoded.rate == value.rate
    for channel, told in zip(value.values.T, decoded.values.T):
        bound = error_bound(channel.min(), np.ptp(channel), levels)
        assert np.abs(channel - told).max() <= bound * (1 + 1e-9)


def test_each_level_of_a_series_refines_the_ones_before() -> None:
    value = Series(np.cumsum(np.random.default_rng(0).normal(size=(400, 3)), axis=0))
    span = SERIES.encode(value, AUDIO)
    errors = []
    for levels in range(4, 9):
        layout = CodebooksLayout(256, levels, 1.0, 1.0, 400, 3)
        cut = TokenSpan("series", layout, np.ascontiguousarray(span.codes[:, :levels]), "cd")
        errors.append(np.abs(SERIES.decode(cut, AUDIO).values - value.values).mean())
    assert all(after < before / 3 for before, after in pairwise(errors)), errors


def test_more_levels_than_a_series_needs_stay_empty() -> None:
    wide = SimpleNamespace(levels=12, hash="cd", codec=AUDIO.codec)
    value = Series(np.arange(6.0).reshape(3, 2))
    span = SERIES.encode(value, wide)
    assert span.codes.shape[1] == 12 and not span.codes[:, 8:].any()
    assert SERIES.compare(value, SERIES.decode(span, wide)).passed


@given(series())
def test_files_of_series_hold_the_values(value: Series) -> None:
    read = SERIES.read(SERIES.write(value, "text/csv"), "text/csv")
    assert np.array_equal(read.values, value.values)
    if len(value.values) > 1:
        assert read.rate == pytest.approx(value.rate, rel=1e-6)
    assert np.array_equal(SERIES.read(SERIES.write(value, NPY), NPY).values, value.values)


def test_names_of_channels_come_back() -> None:
    value = SERIES.read(b"time,temp,wind\n0,1,2\n0.5,3,4\n", "text/csv")
    assert value.rate == 2.0 and value.names == ("temp", "wind")
    assert SERIES.decode(SERIES.encode(value, AUDIO), AUDIO).names == ("temp", "wind")


sides = st.integers(1, 40)
inks = st.tuples(sides, sides).flatmap(lambda shape: hnp.arrays(np.bool_, shape))


@given(inks)
def test_every_pixel_of_a_small_sketch_comes_back(ink: np.ndarray) -> None:
    decoded = SKETCH.decode(SKETCH.encode(ink, VISION), VISION)
    assert np.array_equal(decoded, ink)
    assert np.array_equal(SKETCH.read(SKETCH.write(ink, PNG), PNG), ink)


def test_a_large_sketch_keeps_its_thin_lines() -> None:
    ink = np.zeros((300, 200), bool)
    ink[:, 100] = ink[150, :] = True
    decoded = SKETCH.decode(SKETCH.encode(ink, VISION), VISION)
    assert decoded.shape == ink.shape
    assert decoded[ink].all() and decoded.mean() < 0.06


@given(st.tuples(st.integers(1, 70), st.integers(1, 70)), st.tuples(sides, sides))
def test_bins_are_undone_by_repeating(source: tuple[int, int], target: tuple[int, int]) -> None:
    height, width = min(source[0], target[0]), min(source[1], target[1])
    small = np.arange(height * width).reshape(height, width)
    large = nearest(small, *source)
    assert large.shape == source
    assert np.array_equal(reduce_bins(large, height, width, np.maximum), small)
    assert np.array_equal(reduce_bins(large, height, width, np.minimum), small)


def test_bilinear_keeps_planes_and_constants() -> None:
    assert np.allclose(bilinear(np.full((3, 5), 2.0), 9, 10), 2.0)
    ramp = bilinear(np.arange(8.0)[None], 1, 16)[0]
    assert np.allclose(np.diff(ramp[1:-1]), 0.5)


depths = st.tuples(sides, sides).flatmap(
    lambda shape: hnp.arrays(np.float64, shape, elements=st.just(0.0) | st.floats(0.01, 1e5))
)


@given(depths.filter(lambda depth: depth.any()))
def test_depths_stay_in_range_and_holes_stay_holes(depth: np.ndarray) -> None:
    decoded = DEPTH.decode(DEPTH.encode(depth, VISION), VISION)
    assert decoded.shape == depth.shape
    measured = depth[depth > 0]
    seen = decoded[decoded > 0]
    assert (seen >= measured.min() * (1 - 1e-6)).all() and (seen <= measured.max() * (1 + 1e-6)).all()
    if max(depth.shape) <= 32:
        assert np.array_equal(decoded > 0, depth > 0)


@given(hnp.arrays(np.float64, (32, 32), elements=st.floats(0, 1)))
@settings(max_examples=30)
def test_a_pixel_of_depth_is_off_by_a_third_of_its_contrast_at_most(unit: np.ndarray) -> None:
    holes = np.zeros((32, 32), bool)
    scales = depth_module._encode_pyramid(unit, holes)
    told, _ = depth_module._decode_pyramid(scales)
    coarse, _ = depth_module._decode_pyramid(scales[:-1])
    expected = bilinear(coarse, 32, 32)
    assert (np.abs(told - unit) <= depth_module.residual_error(unit - expected) + 1e-9).all()


def test_smooth_depths_are_close() -> None:
    y, x = np.mgrid[0:96, 0:128]
    depth = 2 + 0.03 * x + 0.01 * y
    figure = DEPTH.compare(depth, DEPTH.decode(DEPTH.encode(depth, VISION), VISION))
    assert figure.value < 0.01


@given(hnp.arrays(np.uint16, (5, 7), elements=st.integers(0, 65535)).filter(lambda levels: levels.any()))
def test_depth_files_hold_millimetres(levels: np.ndarray) -> None:
    depth = levels / 1000
    assert np.allclose(DEPTH.read(DEPTH.write(depth, PNG), PNG), depth)
    assert np.allclose(DEPTH.read(DEPTH.write(depth, NPY), NPY), depth, rtol=1e-6)


@st.composite
def clouds(draw: st.DrawFn) -> np.ndarray:
    count = draw(st.integers(1, 30))
    scale = draw(st.sampled_from([1e-6, 1e-3, 1.0, 1e3, 1e6]))
    unit = draw(hnp.arrays(np.float64, (count, 3), elements=st.floats(-1, 1)))
    centre = draw(hnp.arrays(np.float64, 3, elements=st.floats(-20, 20)))
    return (unit * draw(hnp.arrays(np.float64, 3, elements=st.floats(0, 1))) + centre) * scale


@given(clouds())
def test_points_and_voxels_are_near_each_other(points: np.ndarray) -> None:
    side = float(np.ptp(points, axis=0).max())
    far = float(np.abs(points).max())
    if side > 0 and (far / side > 2000 or side < 1e-20):
        return  # refused, see below
    decoded = POINTS.decode(POINTS.encode(points, VISION), VISION)
    bound = BOUND * side if side else max(far * 1e-4, 1e-20)
    assert nearest_distances(points, decoded).max() <= bound
    assert nearest_distances(decoded, points).max() <= bound


def test_clouds_far_from_the_origin_are_refused() -> None:
    near = np.random.default_rng(1).uniform(size=(50, 3))
    assert POINTS.compare(near + 1000, POINTS.decode(POINTS.encode(near + 1000, VISION), VISION)).passed
    with pytest.raises(InvalidInputError, match="move it nearer"):
        POINTS.encode(near + 1e5, VISION)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.just(3)), elements=st.floats(-1e6, 1e6, width=32))
)
def test_ply_files_hold_the_points(points: np.ndarray) -> None:
    assert np.array_equal(read_ply(write_ply(points)), points)
    lines = "".join(f"{z!r} 7 {x!r} {y!r}\n" for x, y, z in points.astype(float).tolist())
    head = f"ply\nformat ascii 1.0\ncomment c\nelement vertex {len(points)}\n"
    head += "property float z\nproperty uchar red\n"
    tail = "property float x\nproperty float y\nelement face 0\n"
    tail += "property list uchar int vertex_indices\nend_header\n"
    assert np.array_equal(read_ply((head + tail + lines).encode()), points)


def npy(array: np.ndarray) -> bytes:
    return write_npy(array)


def png(mode: str = "L", size: tuple[int, int] = (4, 4)) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its data lacks."""
    data = bytearray(png())
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def claiming(shape: str, dtype: str = "<f8") -> bytes:
    """A ``.npy`` file whose header promises more than it holds."""
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + bytes(16)


def ply(count: str, kind: str = "float", order: str = "binary_little_endian") -> bytes:
    return (
        f"ply\nformat {order} 1.0\nelement vertex {count}\n"
        + "".join(f"property {kind} {axis}\n" for axis in "xyz")
        + "end_header\n"
    ).encode()


objects = io.BytesIO()
np.save(objects, np.array([[{}]], object), allow_pickle=True)
HOSTILE = [
    (SERIES, b"", NPY, "empty"),
    (SERIES, b"\x93NUMPY", NPY, "npy"),
    (SERIES, b"\x93NUMPY\x09\x00" + bytes(99), NPY, "version"),
    (SERIES, claiming("(1000000000000, 4)"), NPY, "needs"),
    (SERIES, claiming("(-1, -2)"), NPY, "npy|needs|empty"),
    (SERIES, claiming("(" * 5000), NPY, "npy"),
    (SERIES, objects.getvalue(), NPY, "real numbers"),
    (SERIES, npy(np.zeros((2, 2), complex)), NPY, "real numbers"),
    (SERIES, npy(np.zeros(4)), NPY, "2 dimensions"),
    (SERIES, npy(np.zeros((0, 2))), NPY, "empty"),
    (SERIES, npy(np.array([[1.0, np.nan]])), NPY, r"nan at \[0, 1\]"),
    (SERIES, npy(np.array([[np.inf]])), NPY, "inf"),
    (SERIES, npy(np.array([[1e308], [-1e308]])), NPY, "range of a channel"),
    (SERIES, npy(np.zeros((2, 65))), NPY, "64 channels"),
    (SERIES, b"a,b\n1\n", "text/csv", "1 values"),
    (SERIES, b"a\nx\n", "text/csv", "line 2"),
    (SERIES, b"a\nnan\n", "text/csv", "nan"),
    (SERIES, b"a\n", "text/csv", "empty"),
    (SERIES, b"time\n0\n1\n", "text/csv", "empty"),
    (SERIES, b"time,a\n0,1\n1,1\n9,1\n", "text/csv", "even steps"),
    (SERIES, b"time,a\n0,1\n0,1\n", "text/csv", "even steps"),
    (SERIES, b"time,a\n1,1\n0,1\n", "text/csv", "even steps"),
    (SERIES, b"\xff\xff", "text/csv", "UTF-8"),
    (DEPTH, png(), PNG, "16 bits"),
    (DEPTH, png("I;16"), PNG, "no measured pixel"),
    (DEPTH, png("I;16")[:40], PNG, "PNG"),
    (DEPTH, png_of(100_000, 100_000), PNG, "pixels"),
    (DEPTH, b"nothing", PNG, "PNG"),
    (DEPTH, npy(np.array([[1.0, -2.0]])), NPY, "negative"),
    (DEPTH, npy(np.array([[np.nan]])), NPY, "nan"),
    (DEPTH, npy(np.array([[1e300]])), NPY, "beyond"),
    (DEPTH, npy(np.zeros((3, 3))), NPY, "no measured pixel"),
    (DEPTH, npy(np.zeros((0, 3))), NPY, "no measured pixel"),
    (SKETCH, png()[:30], PNG, "PNG"),
    (SKETCH, png_of(50_000, 50_000), PNG, "pixels"),
    (SKETCH, png_of(0, 0), PNG, "PNG"),
    (SKETCH, b"GIF89a", PNG, "PNG"),
    (SKETCH, png(), "image/jpeg", "comes as image/png"),
    (POINTS, b"ply\n", PLY, "no PLY"),
    (POINTS, ply("999999999"), PLY, "don't fit"),
    (POINTS, ply("9999999999999"), PLY, "not understood"),
    (POINTS, ply("5", order="ascii"), PLY, "fewer lines"),
    (POINTS, ply("0"), PLY, "no points"),
    (POINTS, ply("1", kind="list"), PLY, "can't have"),
    (POINTS, ply("1", order="ascii") + b"1 2 x\n", PLY, "vertex 0"),
    (POINTS, ply("1", order="ascii") + b"1 2 nan\n", PLY, "nan"),
    (POINTS, ply("1").replace(b"property float z", b"property float x"), PLY, "x, y and z"),
    (POINTS, npy(np.zeros((4, 2))), NPY, "3 coordinates"),
    (POINTS, npy(np.array([[1.0, 2.0, np.inf]])), NPY, "inf"),
]


@pytest.mark.parametrize(("codec", "data", "content_type", "why"), HOSTILE)
def test_what_is_no_medium_is_refused_with_the_reason(
    codec: Any, data: bytes, content_type: str, why: str
) -> None:
    with pytest.raises(InvalidInputError, match=why):
        codec.read_checked(data, content_type)


def test_files_above_the_limit_are_refused_unread() -> None:
    for codec in (SERIES, DEPTH, SKETCH, POINTS):
        with pytest.raises(MediaTooLargeError, match="16777216"):
            codec.read_checked(bytes((16 << 20) + 1), codec.content_types[-1])


@given(st.sampled_from([DEPTH, SKETCH, POINTS]), hnp.arrays(np.uint32, 341, elements=st.integers(0, 65535)))
def test_whatever_a_model_draws_is_a_value_or_an_error(codec: Any, codes: np.ndarray) -> None:
    span = TokenSpan(codec.modality.name, ScalesLayout(16, SCHEDULE), codes, VISION.hash)
    try:
        value = codec.decode(span, VISION)
    except InvalidInputError:
        return
    assert np.isfinite(value).all()


@given(hnp.arrays(np.int16, (8, 8), elements=st.integers(0, 255)))
def test_whatever_a_model_sounds_is_a_series_or_an_error(codes: np.ndarray) -> None:
    span = TokenSpan("series", CodebooksLayout(256, 8, 1.0, 1.0, 5, 2), codes, AUDIO.hash)
    try:
        value = SERIES.decode(span, AUDIO)
    except InvalidInputError:
        return
    assert value.values.shape == (5, 2)


def test_bases_that_are_too_narrow_are_named() -> None:
    with pytest.raises(InvalidInputError, match="needs cells of 16 bits"):
        SKETCH.encode(np.ones((4, 4), bool), SimpleNamespace(bits=12, hash="ab"))
    wide = SimpleNamespace(bits=24, hash="ab")
    ink = np.eye(9, dtype=bool)
    assert np.array_equal(SKETCH.decode(SKETCH.encode(ink, wide), wide), ink)
