"""The video recipe: it gains from time, leaves pictures alone, resumes exactly, and ends in a tokenizer."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from ernie5.protocol.grids import GRIDS
from ernie5.tokenizers.vision.model import VisionModel, VisionModelConfig
from ernie5.tokenizers.vision.tokenizer import VisionTokenizer
from ernie5.tokenizers.vision.training.data import TrainingData, canvases_of
from ernie5.tokenizers.vision.video.data import ClipSampler, VideoData, held_out_clips, load_video_data
from ernie5.tokenizers.vision.video.evaluation import compare, reconstruct_clips
from ernie5.tokenizers.vision.video.model import TemporalConfig, VideoModel, count_video_parameters
from ernie5.tokenizers.vision.video.train import VideoTrainingOptions, _VideoRun, train_video
from ernie5.tokenizers.vision.weights_file import load_weights, save_weights

OPTIONS = VideoTrainingOptions(clips=2, frames=3, learning_rate=1e-2, evaluate_seconds=1e9, seed=3)


@pytest.fixture(scope="module")
def data():
    """Drawn discs, and animations of one that moves."""
    random = np.random.default_rng(0)
    sprites = []
    for _ in range(12):
        sprite = Image.new("RGBA", (96, 96))
        left, top = random.integers(0, 40, 2)
        colour = tuple(random.integers(0, 255, 3).tolist())
        ImageDraw.Draw(sprite).ellipse((left, top, left + 50, top + 40), fill=colour)
        sprites.append(np.asarray(sprite))
    sprites = np.stack(sprites)
    digits = np.stack([sprite[::4, ::4, 3] for sprite in sprites])
    pictures = TrainingData(
        sprites=sprites[:8],
        pictures=canvases_of(sprites[:8], (8, 8)),
        source=np.zeros(8, int),
        held_out=canvases_of(sprites[8:], (8, 8)),
        held_out_source=np.zeros(4, int),
        sources=("shapes",),
        digits=np.pad(digits, ((0, 0), (2, 2), (2, 2))),
        digit_labels=np.arange(12) % 10,
        held_out_digits=digits,
        held_out_labels=np.arange(12) % 10,
    )
    frames = []
    for clip in range(6):
        for place in range(5):
            frame = Image.new("RGB", (64, 64), "white")
            box = (4 * place, 5 * clip, 4 * place + 30, 5 * clip + 30)
            ImageDraw.Draw(frame).ellipse(box, fill=(40 * clip, 90, 200))
            frames.append(np.asarray(frame))
    return VideoData(
        frames=np.stack(frames),
        offsets=np.arange(7) * 5,
        names=tuple("abcdef"),
        train=np.arange(4),
        test=np.array([4, 5]),
        pictures=pictures,
    )


def image_model() -> VisionModel:
    """A small network whose blocks do something, as after training; fresh ones pass things on."""
    torch.manual_seed(0)
    model = VisionModel(VisionModelConfig(width=16))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_a_run_gains_from_time_and_ends_in_a_tokenizer(data, tmp_path):
    image = image_model()
    before = {name: value.clone() for name, value in image.state_dict().items()}
    save_weights(image, tmp_path / "image.safetensors", {})
    loaded, card = load_weights(tmp_path / "image.safetensors")
    digest = str(card["sha256"])
    figures = train_video(
        data, loaded, digest, out=tmp_path, steps=40, options=OPTIONS, card={"licences": "none"}
    )
    assert all(torch.equal(value, before[name].half().float()) for name, value in loaded.state_dict().items())
    for bits in ("16", "24"):
        kind = figures["bit_widths"][bits]["animated"]
        # The picture network is untrained and draws nearly nothing; still the slices learn something.
        assert kind["gain_db"] > 0.1, kind
        assert kind["psnr_video_by_frame"][0] == kind["psnr_image_by_frame"][0]
        assert len(kind["psnr_video_by_frame"]) == figures["frames"] == 12
    card = json.loads((tmp_path / "video.json").read_text())
    assert card["steps"] == 40 and card["licences"] == "none" and card["image_sha256"] == digest
    assert Image.open(tmp_path / "strips.png").size == (8 * 64, 3 * 4 * 64)
    tokenizer = VisionTokenizer.load(tmp_path / "image.safetensors", "cpu")
    assert tokenizer.modalities == ("image", "video")
    more = train_video(
        data,
        loaded,
        "other",
        out=tmp_path / "more",
        steps=0,
        start_from=tmp_path / "video.safetensors",
        options=OPTIONS,
    )
    assert more["bit_widths"] == figures["bit_widths"]


def test_a_resumed_run_equals_the_uninterrupted_one(data, tmp_path):
    def run(out):
        return _VideoRun(data, VideoModel(image_model()), "digest", OPTIONS, out)

    whole = run(tmp_path / "whole")
    for _ in range(4):
        whole.advance(0.1)
    first = run(tmp_path / "parts")
    for _ in range(2):
        first.advance(0.1)
    first.save()
    second = run(tmp_path / "parts")
    second.restore()
    assert second.step == 2
    for _ in range(2):
        second.advance(0.1)
    whole.save()
    second.save()
    left, right = (load_file(tmp_path / kind / "checkpoint.safetensors") for kind in ("whole", "parts"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    shutil.copytree(tmp_path / "parts", tmp_path / "other")
    other = _VideoRun(data, VideoModel(image_model()), "another", OPTIONS, tmp_path / "other")
    with pytest.raises(ValueError, match="--init"):
        other.restore()


def test_a_bound_and_data_are_needed(data, tmp_path):
    with pytest.raises(ValueError, match="either minutes or steps"):
        train_video(data, image_model(), "", out=tmp_path)
    with pytest.raises(FileNotFoundError, match="corpus build motion"):
        load_video_data(tmp_path)
    with pytest.raises(ValueError, match="no time"):
        ClipSampler(data, clips=1, frames=1, seed=0)
    with pytest.raises(ValueError, match="odd sizes"):
        TemporalConfig((2,))


def test_batches_are_functions_of_the_step_and_move(data):
    sampler = ClipSampler(data, clips=2, frames=3, seed=1)
    seen, moving = set(), 0
    for step in range(40):
        batch = sampler.draw(step)
        assert batch.shape[1:3] == (3, 3) and batch.min() >= 0 and batch.max() <= 1
        seen.add((batch.shape[3] // 8, batch.shape[4] // 8))
        moving += int((batch[:, 1:] != batch[:, :-1]).any())
    assert seen <= set(GRIDS) and {(8, 8), (4, 4)} <= seen and moving > 25
    assert torch.equal(sampler.draw(5), sampler.draw(5))


def test_held_out_clips_are_not_trained_on(data):
    kinds = held_out_clips(data, 7)
    assert {kind: tuple(clips.shape[:2]) for kind, clips in kinds.items()} == {
        "animated": (2, 7),
        "moving": (2, 7),
        "still": (2, 7),
    }
    assert (kinds["still"] == kinds["still"][:, :1]).all()
    first = torch.from_numpy(data.clip(4)[0]).permute(2, 0, 1).float() / 255
    assert torch.equal(kinds["animated"][0, 0], first) and torch.equal(kinds["animated"][0, 5], first)


def test_untrained_slices_gain_nothing(data):
    model = VideoModel(image_model())
    clips = held_out_clips(data, 3)["animated"]
    assert torch.equal(reconstruct_clips(model, clips, 16), reconstruct_clips(model, clips, 16, past=False))
    figures = compare(model, clips, 16)
    assert figures["gain_db"] == 0 and figures["clips_gained"] == 0


def test_the_shipped_sizes_stay_small():
    model = VideoModel(VisionModel(VisionModelConfig()))
    assert 2 * count_video_parameters(model) < 2_000_000  # bytes in float16
