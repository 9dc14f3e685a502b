"""The shipped tokenizer: same codes in any batch, pictures back at their size, honest refusals."""

import dataclasses
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from ernie5.kernels.scales import accumulate, join_codes, quantise
from ernie5.protocol.errors import (
    InvalidInputError,
    InvalidMediaError,
    MediaTooLargeError,
    TokenizerMismatchError,
    UnsupportedMediaError,
)
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import ScalesLayout, TokenSpan
from ernie5.tokenizers.base import Tokenizer
from ernie5.tokenizers.vision import VisionTokenizer
from ernie5.tokenizers.vision.training.data import DIGIT_FILE, PICTURE_FILES
from ernie5.tokenizers.vision.weights_file import FORMAT_VERSION, SHIPPED_WEIGHTS


@pytest.fixture(scope="module")
def tokenizer():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield VisionTokenizer.load(device="cpu")
    torch.set_num_threads(threads)


def face(size=64, background="white"):
    picture = Image.new("RGB", (size, size), background)
    draw = ImageDraw.Draw(picture)
    draw.ellipse([size * part for part in (0.06, 0.06, 0.94, 0.94)], fill=(255, 205, 60))
    for left in (0.3, 0.6):
        draw.ellipse([size * part for part in (left, 0.3, left + 0.1, 0.5)], fill=(90, 50, 10))
    draw.arc(
        [size * part for part in (0.25, 0.35, 0.75, 0.8)],
        20,
        160,
        fill=(90, 50, 10),
        width=max(1, size // 20),
    )
    return picture


def png(picture):
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def decibels(left, right):
    difference = np.asarray(left, float) / 255 - np.asarray(right, float) / 255
    return -10 * np.log10((difference**2).mean() + 1e-10)


def noise(height, width, seed):
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8).astype(np.uint8)
    )


SIZES = [(28, 28), (40, 31), (64, 64), (90, 120), (30, 200), (300, 300)]


def test_it_is_a_tokenizer_with_the_documented_span(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    span = tokenizer.encode(png(face()), latent=True)
    assert span.layout.schedule == ((1, 1), (2, 2), (4, 4), (8, 8)) and span.layout.bits == 16
    assert span.codes.dtype == np.uint32 and len(span) == 85
    assert span.tokenizer == tokenizer.hash
    assert span.features["cnn"].shape == (16, 4, tokenizer.feature_width)
    assert span.latent.shape == (8, 8, 16)
    assert np.isfinite(span.features["cnn"]).all()
    bare = tokenizer.encode(face(), features=False)
    assert not bare.features and bare.latent is None
    np.testing.assert_array_equal(bare.codes, span.codes)


def test_a_picture_survives(tokenizer):
    assert decibels(tokenizer.decode(tokenizer.encode(face())), face()) > 18


def test_coarse_scales_draw_a_coarse_picture(tokenizer):
    """Errors fall scale by scale, so a model that predicts scales builds a picture from coarse to fine."""
    span = tokenizer.encode(face())
    errors = []
    for upto in range(1, 5):
        total = accumulate(span.codes, span.layout.schedule, 16, upto)
        with torch.no_grad():
            drawn = tokenizer._model.decode(total[None])[0].clamp(0, 1).permute(1, 2, 0)
        errors.append(decibels(drawn.numpy() * 255, face()))
    assert errors == sorted(errors) and errors[-1] > errors[0] + 5


@pytest.mark.parametrize(("height", "width"), [*SIZES, (1, 1), (1, 16_384), (700, 500)])
def test_any_size_comes_back(tokenizer, height, width):
    span = tokenizer.encode(Image.new("RGB", (width, height), (200, 30, 60)))
    scale = min(1, 512 / max(height, width))
    assert tokenizer.decode(span).size == (max(1, round(width * scale)), max(1, round(height * scale)))


def test_codes_do_not_depend_on_the_batch(tokenizer):
    pictures = [noise(*SIZES[index % len(SIZES)], index) for index in range(18)] + [face()]
    alone = [tokenizer.encode(picture, latent=True) for picture in pictures]
    assert tokenizer.encode_batch(pictures, latent=True) == alone
    assert tokenizer.encode_batch(pictures[::-1], latent=True) == alone[::-1]
    drawn = [tokenizer.decode(span) for span in alone]
    for one, many in zip(drawn, tokenizer.decode_batch(alone)):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(many))


def test_a_second_replica_agrees(tokenizer):
    other = VisionTokenizer.load(SHIPPED_WEIGHTS, "cpu")
    assert other.hash == tokenizer.hash
    assert other.encode(noise(64, 64, 1)) == tokenizer.encode(noise(64, 64, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_codes_do_not_depend_on_the_batch(tokenizer):
    gpu = VisionTokenizer.load(device="cuda")
    assert gpu.hash != tokenizer.hash
    pictures = [noise(64, 64, index) for index in range(35)]
    assert gpu.encode_batch(pictures) == [gpu.encode(picture) for picture in pictures]


def test_the_latent_gives_the_codes(tokenizer):
    """Float16 rounding may turn a sign that is almost zero, nothing more."""
    span = tokenizer.encode(face(), latent=True)
    latent = torch.from_numpy(span.latent.astype(np.float32)).permute(2, 0, 1)
    codes = join_codes(quantise(latent, span.layout.schedule)).numpy()
    flipped = np.bitwise_count(codes.astype(np.uint32) ^ span.codes).sum()
    assert flipped <= 0.01 * 85 * 16


def test_features_are_the_trunk_cells(tokenizer):
    span = tokenizer.encode(noise(30, 200, 4))  # 4 x 16 cells
    canvas = np.asarray(noise(30, 200, 4).resize((128, 19), Image.Resampling.BILINEAR))
    assert span.features["cnn"].shape == (2 * 8, 4, tokenizer.feature_width)
    assert span.layout.transform.width == 128 and canvas.shape[:2] == (span.layout.transform.height, 128)
    from ernie5.tokenizers.vision.preprocessing import fit_to_canvas

    pixels = torch.from_numpy(fit_to_canvas(noise(30, 200, 4))[0]).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        trunk = tokenizer._model.encode(pixels)[0][0]
    for token, corner, row, column in ((0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 1, 0), (11, 3, 3, 7)):
        expected = trunk[:, row, column].half().numpy()
        np.testing.assert_array_equal(span.features["cnn"][token, corner], expected)


def test_a_generated_span_is_drawn_whole(tokenizer):
    schedule = schedule_for((12, 12))
    codes = np.random.default_rng(0).integers(0, 2**16, sum(h * w for h, w in schedule)).astype(np.uint32)
    span = TokenSpan("image", ScalesLayout(16, schedule), codes, tokenizer.hash)
    assert tokenizer.decode(span).size == (96, 96)
    (medium,) = tokenizer.decode_spans([span])
    assert medium.content_type == "image/png" and Image.open(io.BytesIO(medium.data)).size == (96, 96)
    (medium,) = tokenizer.decode_spans([span], content_type="image/jpeg")
    assert Image.open(io.BytesIO(medium.data)).format == "JPEG"
    total = accumulate(codes, schedule, 16)
    assert total.shape == (16, 12, 12)


def test_bad_segments_leave_the_others_untouched(tokenizer):
    good = Segment(modality="image", data=png(face()))
    results = tokenizer.encode_segments(
        [
            Segment(modality="image", data=b""),
            good,
            Segment(modality="speech", data=b"RIFF"),
            Segment(modality="image", text="a cat"),
            Segment(modality="image", data=png(Image.new("L", (16_385, 1)))),
            good,
        ]
    )
    kinds = [
        InvalidMediaError,
        TokenSpan,
        UnsupportedMediaError,
        InvalidMediaError,
        MediaTooLargeError,
        TokenSpan,
    ]
    assert [type(result) for result in results] == kinds
    assert results[1] == tokenizer.encode(face())


def test_spans_of_others_are_refused(tokenizer):
    span = tokenizer.encode(face())
    with pytest.raises(TokenizerMismatchError, match="was made by tokenizer 0000"):
        tokenizer.decode(dataclasses.replace(span, tokenizer="0000"))
    foreign = TokenSpan("sketch", span.layout, span.codes, tokenizer.hash)
    with pytest.raises(UnsupportedMediaError):
        tokenizer.decode(foreign)
    narrow = TokenSpan("image", ScalesLayout(8, ((1, 1),)), np.zeros(1, np.uint32), tokenizer.hash)
    with pytest.raises(InvalidInputError, match="16-bit"):
        tokenizer.decode(narrow)
    odd = TokenSpan("image", ScalesLayout(16, ((2, 2), (4, 4))), np.zeros(20, np.uint32), tokenizer.hash)
    with pytest.raises(InvalidInputError, match="schedule"):
        tokenizer.decode(odd)
    huge = schedule_for((64, 64))
    cells = np.zeros(sum(h * w for h, w in huge), np.uint32)
    with pytest.raises(InvalidInputError, match="1024 cells"):
        tokenizer.decode(TokenSpan("image", ScalesLayout(16, huge), cells, tokenizer.hash))
    results = tokenizer.decode_batch([foreign, span])
    assert isinstance(results[0], UnsupportedMediaError) and results[1].size == (64, 64)
    assert isinstance(tokenizer.decode_spans([span], content_type="image/gif")[0], UnsupportedMediaError)


def test_damaged_weights_are_refused(tmp_path):
    for suffix in (".safetensors", ".json"):
        data = SHIPPED_WEIGHTS.with_suffix(suffix).read_bytes()
        (tmp_path / "image").with_suffix(suffix).write_bytes(data)
    path = tmp_path / "image.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="sha256"):
        VisionTokenizer.load(path, "cpu")
    card = path.with_suffix(".json")
    card.write_text(card.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99'))
    with pytest.raises(ValueError, match="99"):
        VisionTokenizer.load(path, "cpu")
    with pytest.raises(FileNotFoundError):
        VisionTokenizer.load(tmp_path / "none.safetensors", "cpu")


def test_the_card_tells_origin_and_quality():
    card = json.loads(SHIPPED_WEIGHTS.with_suffix(".json").read_text(encoding="utf-8"))
    assert card["data"].keys() == card["licences"].keys() == {*PICTURE_FILES, DIGIT_FILE}
    assert "ernie-multi" in card["command"]
    figures = card["figures"]["16"]
    assert figures["psnr"] >= 23.0 and figures["ssim"] >= 0.80
    assert figures["digit_judge_ratio"] >= 0.97
    assert SHIPPED_WEIGHTS.stat().st_size < 3_000_000
