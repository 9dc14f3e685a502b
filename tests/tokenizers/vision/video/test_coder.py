"""Clips: one frame is a picture, chunks are the whole, batches change nothing, and spans decode in time."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image

from ernie5.protocol.errors import (
    ErnieMultiError,
    InvalidInputError,
    TokenizerMismatchError,
    UnsupportedMediaError,
)
from ernie5.protocol.samples import Segment
from ernie5.protocol.spans_json import span_from_json, span_to_json
from ernie5.protocol.tokens import TokenSpan
from ernie5.protocol.wire import decode_span, encode_span
from ernie5.tokenizers.vision.execution import Execution
from ernie5.tokenizers.vision.model import VisionModel, VisionModelConfig
from ernie5.tokenizers.vision.preprocessing import ImageLimits
from ernie5.tokenizers.vision.tokenizer import VisionTokenizer
from ernie5.tokenizers.vision.video.coder import ClipDecoder, ClipEncoder, merge_neighbours
from ernie5.tokenizers.vision.video.files import Clip, read_clip, write_clip
from ernie5.tokenizers.vision.video.model import TemporalConfig, VideoModel
from ernie5.tokenizers.vision.video.weights import (
    VideoWeights,
    find_video_weights,
    load_video_weights,
    save_video_weights,
)
from ernie5.tokenizers.vision.weights_file import load_weights, save_weights

SMALL = VisionModelConfig(width=16)


def small_model(seed: int = 0, past: float = 0.05) -> VideoModel:
    """A small network whose blocks and earlier slices are not zero, as after training."""
    torch.manual_seed(seed)
    image = VisionModel(SMALL)
    for parameter in image.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    model = VideoModel(image, TemporalConfig((3, 1)))
    for parameter in model.past.parameters():
        torch.nn.init.normal_(parameter, std=past)
    return model.eval()


def make(bits: int | None = None, past: float = 0.05) -> VisionTokenizer:
    model = small_model(past=past)
    weights = VideoWeights(model, "video/test")
    execution = Execution("cpu")
    return VisionTokenizer(
        model.image, "0" * 64, torch.device("cpu"), ImageLimits(), bits, execution, video=weights
    )


@pytest.fixture(scope="module")
def tokenizer():
    return make()


def frames_of(count: int, size: tuple[int, int] = (64, 64), seed: int = 0) -> list[Image.Image]:
    """A disc that moves over a ground of its own colour."""
    random = np.random.default_rng(seed)
    ground, disc = random.integers(0, 255, (2, 3))
    rows, columns = np.indices(size[::-1])
    frames = []
    for index in range(count):
        inside = (rows - size[1] / 2) ** 2 + (columns - 15 - 3 * index) ** 2 < 150
        frames.append(Image.fromarray(np.where(inside[..., None], disc, ground).astype(np.uint8)))
    return frames


def webp(frames: list[Image.Image], rate: float = 10.0) -> bytes:
    return write_clip(frames, rate)[0]


def video(data: bytes) -> Segment:
    return Segment(modality="video", data=data, content_type="image/webp")


def only(results):
    (result,) = results
    assert not isinstance(result, ErnieMultiError), result
    return result


@pytest.mark.parametrize("bits", [16, 24])
@pytest.mark.parametrize("size", [(64, 64), (28, 28), (100, 60)])
def test_a_clip_of_one_frame_has_the_pictures_codes(bits, size):
    tokenizer = make(bits)
    data = io.BytesIO()
    frames_of(1, size)[0].save(data, "PNG")
    picture = tokenizer.encode(data.getvalue(), latent=True)
    clip = only(tokenizer.encode_segments([video(data.getvalue())], latent=True))
    assert clip.layout == picture.layout and clip.modality == "video"
    np.testing.assert_array_equal(clip.codes, picture.codes)
    np.testing.assert_array_equal(clip.latent, picture.latent.reshape(clip.latent.shape))
    drawn = only(tokenizer.video.decode_batch([clip]))
    np.testing.assert_array_equal(np.asarray(drawn.frames[0]), np.asarray(tokenizer.decode(picture)))


def test_the_past_is_seen_and_the_future_is_not(tokenizer):
    coder = tokenizer.video
    clips = np.random.default_rng(0).integers(0, 255, (2, 5, 64, 64, 3)).astype(np.uint8)
    clips[1, 3:] = clips[0, 3:]
    first, second = (ClipEncoder(coder).push(clip[None]).codes[0] for clip in clips)
    assert (first[3] != second[3]).any()  # other frames before it
    changed = clips[0].copy()
    changed[4] = 255 - changed[4]
    np.testing.assert_array_equal(ClipEncoder(coder).push(changed[None]).codes[0, :4], first[:4])
    alone = ClipEncoder(coder).push(clips[0, 3:4][None]).codes[0, 0]
    assert (alone != first[3]).any()


@pytest.mark.parametrize("grid", [(64, 64), (32, 32), (48, 80)])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunks_equal_the_whole_to_the_bit(tokenizer, chunk, grid):
    coder = tokenizer.video
    random = np.random.default_rng(chunk)
    clip = random.integers(0, 255, (1, 7, *grid, 3)).astype(np.uint8)
    whole = ClipEncoder(coder).push(clip)
    encoder = ClipEncoder(coder)
    parts = [encoder.push(clip[:, at : at + chunk]) for at in range(0, 7, chunk)]
    np.testing.assert_array_equal(np.concatenate([part.codes for part in parts], 1), whole.codes)
    assert torch.equal(torch.cat([part.latent for part in parts], 1), whole.latent)
    assert torch.equal(torch.cat([part.trunk for part in parts], 1), whole.trunk)
    cells = (grid[0] // 8, grid[1] // 8)
    drawn = ClipDecoder(coder, cells).push(whole.codes)
    decoder = ClipDecoder(coder, cells)
    again = [decoder.push(whole.codes[:, at : at + chunk]) for at in range(0, 7, chunk)]
    np.testing.assert_array_equal(np.concatenate(again, 1), drawn)


def test_training_and_use_agree(tokenizer):
    model = small_model()
    clips = torch.rand(2, 5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trunk, latent = model.encode_clips(clips)
        drawn = model.decode_clips(latent)
        encoded, decoded = {}, {}
        for place in range(5):
            one, two, encoded = model.encode_frame(clips[:, place], encoded)
            three, decoded = model.decode_frame(latent[:, place], decoded)
            torch.testing.assert_close(one, trunk[:, place], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(two, latent[:, place], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(three, drawn[:, place], atol=1e-4, rtol=1e-4)


def test_clips_do_not_depend_on_the_batch(tokenizer):
    sizes = [(64, 64), (28, 28), (64, 64), (90, 60)]
    clips = [webp(frames_of(2 + index, size, index)) for index, size in enumerate(sizes)]
    picture = io.BytesIO()
    frames_of(1)[0].save(picture, "PNG")
    segments = [video(clip) for clip in clips]
    segments.insert(2, Segment(modality="image", data=picture.getvalue()))
    segments.insert(1, video(b"no clip"))
    segments.insert(0, Segment(modality="speech", data=b"x"))
    results = tokenizer.encode_segments(segments, latent=True)
    bad = [index for index, result in enumerate(results) if isinstance(result, ErnieMultiError)]
    assert bad == [0, 2]
    alone = [tokenizer.encode_segments([segment], latent=True)[0] for segment in segments]
    spans = [span for span in results if isinstance(span, TokenSpan)]
    assert spans == [span for span in alone if isinstance(span, TokenSpan)]
    media = tokenizer.decode_spans(spans)
    types = {"image": "image/png", "video": "image/webp"}
    assert [medium.content_type for medium in media] == [types[span.modality] for span in spans]
    for span, medium in zip(spans, media):
        assert tokenizer.decode_spans([span]) == [medium]


def test_length_and_rate_come_back(tokenizer):
    for rate, count, content_types in (
        (10.0, 8, (None, "image/gif", "video/mp4", "video/webm")),
        (5.0, 3, (None, "video/mp4")),
        (2.5, 2, (None,)),
    ):
        span = only(tokenizer.encode_segments([video(webp(frames_of(count, (90, 60)), rate))]))
        assert span.layout.frames == count and span.metadata["frame_rate"] == pytest.approx(rate)
        for content_type in content_types:
            medium = only(tokenizer.decode_spans([span], content_type=content_type))
            again = read_clip(medium.data)
            assert len(again.frames) == count, content_type
            assert again.seconds == pytest.approx(count / rate, abs=0.02)
            assert (again.transform.source_width, again.transform.source_height) == (90, 60)


def test_spans_cross_the_wire_and_generated_ones_need_no_metadata(tokenizer):
    span = only(tokenizer.encode_segments([video(webp(frames_of(5)))], features=True, latent=True))
    assert decode_span(encode_span(span)) == span
    assert span_from_json(span_to_json(span, features=True)) == span
    bare = dataclasses.replace(span, layout=dataclasses.replace(span.layout, transform=None), metadata={})
    clip = only(tokenizer.video.decode_batch([bare]))
    assert len(clip.frames) == 5 and clip.frames[0].size == (64, 64) and clip.frame_rate == 12.5


def test_features_are_four_neighbouring_frames(tokenizer):
    trunk = torch.arange(6.0).view(6, 1, 1, 1) * 100 + torch.arange(16.0).view(1, 1, 4, 4)
    features = merge_neighbours(trunk)
    assert features.shape == (2 * 2 * 2, 16, 1) and features.dtype == np.float16
    first = features[0, :, 0].reshape(4, 2, 2)  # frames 0 to 3, the cells 0, 1, 4, 5
    np.testing.assert_array_equal(first[0], [[0, 1], [4, 5]])
    np.testing.assert_array_equal(first[:, 0, 0], [0, 100, 200, 300])
    np.testing.assert_array_equal(features[1, :4, 0], [2, 3, 6, 7])
    last = features[4, :, 0].reshape(4, 2, 2)[:, 0, 0]
    np.testing.assert_array_equal(last, [400, 500, 500, 500])
    span = only(tokenizer.encode_segments([video(webp(frames_of(6)))], features=True))
    assert span.features["cnn"].shape == (2 * 16, 16, tokenizer.feature_width)
    assert merge_neighbours(torch.zeros(1, 2, 3, 5)).shape == (1 * 2 * 3, 16, 2)


def test_foreign_and_odd_spans_are_refused(tokenizer):
    span = only(tokenizer.encode_segments([video(webp(frames_of(3)))]))
    wrong = [
        (dataclasses.replace(span, tokenizer="00"), TokenizerMismatchError),
        (dataclasses.replace(span, metadata={"frame_rate": "fast"}), InvalidInputError),
        (dataclasses.replace(span, metadata={"frame_rate": float("nan")}), InvalidInputError),
        (dataclasses.replace(span, modality="points"), UnsupportedMediaError),
        (
            dataclasses.replace(
                span,
                layout=dataclasses.replace(span.layout, frames=300),
                codes=np.tile(span.codes, 100),
            ),
            InvalidInputError,
        ),
    ]
    for bad, error in wrong:
        assert isinstance(tokenizer.decode_spans([bad])[0], error)
    (refused,) = tokenizer.decode_spans([span], content_type="image/jpeg")
    assert isinstance(refused, UnsupportedMediaError) and "image/webp" in refused.message


def test_untrained_slices_change_nothing():
    still, plain = make(past=0.0), make()
    clip = webp(frames_of(3))
    by_frame = [
        plain.encode(Image.fromarray(frame), features=False).codes for frame in read_clip(clip).frames
    ]
    span = only(still.encode_segments([video(clip)]))
    np.testing.assert_array_equal(span.codes, np.concatenate(by_frame))


def test_weights_are_kept_with_their_pictures(tmp_path):
    model = small_model()
    save_weights(model.image, tmp_path / "image.safetensors", {})
    image, card = load_weights(tmp_path / "image.safetensors")
    digest = str(card["sha256"])
    assert VisionTokenizer.load(tmp_path / "image.safetensors", "cpu").modalities == ("image",)
    save_video_weights(model, digest, tmp_path / "video.safetensors", {"data": "none"})
    loaded, card = load_video_weights(image, digest, tmp_path / "video.safetensors")
    assert card["data"] == "none" and card["config"] == {"kernels": [3, 1]}
    for name, value in model.past.state_dict().items():
        torch.testing.assert_close(loaded.past.state_dict()[name], value, atol=1e-3, rtol=1e-3)
    tokenizer = VisionTokenizer.load(tmp_path / "image.safetensors", "cpu")
    assert tokenizer.modalities == ("image", "video")
    with pytest.raises(ValueError, match="train it again"):
        load_video_weights(image, "ff" * 32, tmp_path / "video.safetensors")
    assert find_video_weights(image, "ff" * 32, tmp_path / "image.safetensors") is None
    (tmp_path / "video.safetensors").write_bytes(b"damaged")
    assert VisionTokenizer.load(tmp_path / "image.safetensors", "cpu").video is None


def test_a_longer_clip_is_the_same_clip_and_more(tokenizer):
    """Causality as a stream needs it: the tokens of a clip begin with those of its beginning."""
    frames = np.stack([np.asarray(frame) for frame in frames_of(6)])
    short = read_clip(webp(frames_of(6)[:3]))
    transform = short.transform
    spans = tokenizer.video.encode_batch(
        [Clip(frames[:3], transform, 0.3), Clip(frames, transform, 0.6)], features=False
    )
    np.testing.assert_array_equal(spans[0].codes, spans[1].codes[: len(spans[0].codes)])
