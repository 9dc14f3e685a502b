"""The waveform codec's recipe: both phases run, resume, and publish what can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ernie5.tokenizers.audio.clips import FRAME_SAMPLES, Clips
from ernie5.tokenizers.audio.storage import WAVEFORM_FILE, read_waveform_codec
from ernie5.tokenizers.audio.waveform import WaveformCodec
from ernie5.tokenizers.audio.waveform_train import WaveformRecipe, held_out_distance, train_waveform
from tests.tokenizers.audio.clips import write_clips

TINY = WaveformRecipe(
    steps=4,
    batch=2,
    samples=2 * FRAME_SAMPLES,
    adversarial_from=2,
    save_every=2,
    discriminator_width=4,
    config=WaveformCodec.Config(width=4, dilations=(1,), latent=8, levels=3, codebook_size=16),
)


class Interrupted(Exception):
    pass


def test_the_recipe_runs_with_adversaries_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    write_clips(tmp_path / "clips.npz")
    seen: list[dict[str, float]] = []
    train_waveform(tmp_path, tmp_path / "whole", TINY, on_step=lambda step, measured: seen.append(measured))
    assert "fooled" not in seen[0]
    assert all(measured[key] > 0 for measured in seen[2:] for key in ("discriminator", "fooled", "matched"))

    def stop(step: int, measured: dict[str, float]) -> None:
        if step == 3:
            raise Interrupted

    with pytest.raises(Interrupted):
        train_waveform(tmp_path, tmp_path / "parts", TINY, on_step=stop)
    train_waveform(tmp_path, tmp_path / "parts", TINY)
    whole, parts = (load_file(tmp_path / name / WAVEFORM_FILE) for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    codec = read_waveform_codec(tmp_path / "whole" / WAVEFORM_FILE)
    distances = held_out_distance(codec, Clips.load(tmp_path), limit=2)
    assert all(0 < distance < 10 for distance in distances.values())


def test_it_is_causal_and_keeps_lengths() -> None:
    torch.manual_seed(0)
    codec = WaveformCodec(TINY.config).requires_grad_(False)
    samples = torch.rand(1, 3 * FRAME_SAMPLES) - 0.5
    changed = samples.clone()
    changed[:, 2 * FRAME_SAMPLES :] = 0.0
    one, two = codec.to_latent(samples), codec.to_latent(changed)
    assert torch.allclose(one[..., :2], two[..., :2], atol=1e-6)
    assert not torch.allclose(one[..., 2], two[..., 2])
    assert codec.decode(codec.encode(samples)).shape == samples.shape
    with pytest.raises(ValueError, match="100 samples"):
        codec.encode(samples[:, :100])
    with pytest.raises(ValueError, match="multiply to 16"):
        WaveformCodec(WaveformCodec.Config(strides=(4, 4)))
