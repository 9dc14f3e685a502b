"""The recipe: it learns, it resumes to the same weights, its clips and judge are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ernie5.tokenizers.audio.clips import Clips, MelStream, waveform_batch
from ernie5.tokenizers.audio.evaluation import evaluate
from ernie5.tokenizers.audio.mel import LOG_FLOOR
from ernie5.tokenizers.audio.storage import CODEC_FILE, VOCODER_FILE
from ernie5.tokenizers.audio.tokenizer import AudioTokenizer
from ernie5.tokenizers.audio.train import Recipe, train
from tests.tokenizers.audio.clips import write_clips

SMALL = dict(
    codec_batch=3,
    codec_frames=32,
    vocoder_batch=2,
    vocoder_samples=2560,
    start_items=60,
    start_rounds=3,
    save_every=2,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    write_clips(folder / "one.npz", seed=0)
    write_clips(folder / "two.npz", seed=100)
    return folder


def test_clips_of_several_files_join(data: Path) -> None:
    clips = Clips.load(data)
    assert len(clips) == 48
    assert clips.digit[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert len(clips.waveform(24)) == 4800
    assert clips.padded([0, 24], 8000).shape == (2, 8000)


def test_missing_clips_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="npz"):
        Clips.load(tmp_path)


def test_batches_hold_whole_digits_followed_by_silence(data: Path) -> None:
    clips = Clips.load(data)
    stream = MelStream.of(clips, np.arange(24))
    batch = stream.batch(10, 128, 1.0, np.random.default_rng(0))
    assert batch.log_mels.shape == (10, 80, 128)
    assert torch.allclose(batch.log_mels[..., -8:], torch.tensor(LOG_FLOOR), atol=0.01)
    assert float(batch.log_mels[..., :24].max()) > -2
    assert not batch.known.any()
    samples = waveform_batch(clips, np.arange(24), 4, 2560, 0.5, np.random.default_rng(0))
    assert samples.shape == (4, 2560)
    assert float(samples.abs().max()) > 0.01


def test_interrupted_run_ends_with_the_same_weights(data: Path, tmp_path: Path) -> None:
    recipe = Recipe(codec_steps=6, vocoder_steps=4, **SMALL)
    train(data, tmp_path / "whole", recipe, show_progress=False)

    class Interrupted(Exception):
        pass

    for phase, steps in (("codec", 3), ("vocoder", 3)):
        with pytest.raises(Interrupted):
            train(
                data,
                tmp_path / "parts",
                recipe,
                show_progress=False,
                on_step=_stop(phase, steps, Interrupted),
            )
    train(data, tmp_path / "parts", recipe, show_progress=False)
    for name in (CODEC_FILE, VOCODER_FILE):
        whole, parts = load_file(tmp_path / "whole" / name), load_file(tmp_path / "parts" / name)
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert json.loads((tmp_path / "parts" / "metrics.json").read_text())["codec"]["steps"] == 6
    assert AudioTokenizer.load(tmp_path / "parts").hash == AudioTokenizer.load(tmp_path / "whole").hash


def _stop(phase: str, after: int, error: type[Exception]):
    def on_step(name: str, step: int) -> None:
        if (name, step) == (phase, after):
            raise error

    return on_step


def test_training_lowers_the_loss_and_evaluation_measures_it(data: Path, tmp_path: Path) -> None:
    recipe = Recipe(codec_steps=12, vocoder_steps=40, **{**SMALL, "save_every": 10})
    metrics = train(data, tmp_path, recipe, show_progress=False)
    curve = [point["log_mel_l1"] for point in metrics["vocoder"]["curve"]]
    assert curve[-1] < curve[0]
    result = evaluate(data, tmp_path, tmp_path / "figures", judge_steps=5)
    assert (tmp_path / "figures" / "spectrograms.png").stat().st_size > 10_000
    assert result["digits"]["_n"]["all"] == 12
    assert 0 <= result["digits"]["vocoder_8"]["all"] <= 1
    distances = result["log_mel_l1"]
    assert distances["original"]["all"] == 0
    assert 0 < distances["codec_mel_8"]["all"] < distances["codec_mel_2"]["all"] < 3
    assert len(result["perplexity"]) == 8
