"""The codec's structure: causality, lengths, a useful start."""

from __future__ import annotations

import pytest
import torch

from ernie5.tokenizers.audio.codec import FRAME, MelCodec
from ernie5.tokenizers.audio.mel import LOG_FLOOR, log_mel
from ernie5.tokenizers.audio.vocoder import PHASE_PERIOD, Vocoder
from tests.tokenizers.audio.clips import voice_like


@pytest.fixture(scope="module")
def mels() -> torch.Tensor:
    clips = [torch.from_numpy(voice_like(1.28, seed=seed)) for seed in range(24)]
    return log_mel(torch.stack(clips))


@pytest.fixture(scope="module")
def codec(mels: torch.Tensor) -> MelCodec:
    torch.manual_seed(0)
    codec = MelCodec(MelCodec.Config(widths=(16, 24, 32), latent=16, levels=4, codebook_size=32))
    codec.start(mels, torch.Generator().manual_seed(0), rounds=20)
    for layer in (codec.encoder[-1], codec.decoder[-1].conv):
        torch.nn.init.normal_(layer.weight, std=0.02)  # the convolutions start silent; let them speak
    return codec.eval().requires_grad_(False)


def test_start_reconstructs_better_than_the_mean(codec: MelCodec, mels: torch.Tensor) -> None:
    fresh = MelCodec(codec.config)
    fresh.start(mels, torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = float((fresh.decode(fresh.encode(mels)) - mels).abs().mean())
    assert error < 0.5 * float((mels - mels.mean((0, 2), keepdim=True)).abs().mean())


def test_a_later_frame_changes_no_earlier_one(codec: MelCodec, mels: torch.Tensor) -> None:
    changed = mels.clone()
    changed[..., 8 * FRAME :] = LOG_FLOOR
    latent, other = codec.to_latent(mels), codec.to_latent(changed)
    assert torch.allclose(latent[..., :8], other[..., :8], atol=1e-5)
    assert not torch.allclose(latent[..., 8:], other[..., 8:], atol=1e-2)
    decoded, other = codec.from_latent(latent), codec.from_latent(other)
    assert torch.allclose(decoded[..., : 8 * FRAME], other[..., : 8 * FRAME], atol=1e-4)


def test_lengths(codec: MelCodec, mels: torch.Tensor) -> None:
    codes = codec.encode(mels[:2, :, : 3 * FRAME])
    assert codes.shape == (2, 3, 4)
    assert codec.decode(codes).shape == (2, 80, 3 * FRAME)
    assert float(codec.decode(codes).min()) >= LOG_FLOOR
    with pytest.raises(ValueError, match="13 mel frames"):
        codec.encode(mels[:, :, :13])


@pytest.mark.parametrize("frames", [8, PHASE_PERIOD, 200])
def test_vocoder_in_chunks_agrees_with_the_whole(mels: torch.Tensor, frames: int) -> None:
    torch.manual_seed(0)
    vocoder = Vocoder(Vocoder.Config(width=16, blocks=3)).requires_grad_(False)
    long = torch.cat([mels[0], mels[1]], dim=-1)[None, :, :frames]
    whole = vocoder(long)
    assert whole.shape == (1, frames * 160)
    assert torch.allclose(vocoder.synthesise(long, chunk=2 * PHASE_PERIOD), whole, atol=1e-5)
