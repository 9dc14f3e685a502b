"""The mel transform and its plain inversion."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ernie5.tokenizers.audio.mel import (
    BANDS,
    HOP,
    LOG_FLOOR,
    filterbank,
    griffin_lim,
    linear_magnitude,
    log_mel,
)
from tests.tokenizers.audio.clips import voice_like


def test_frames_and_floor_of_silence() -> None:
    mels = log_mel(torch.zeros(2, 1280))
    assert mels.shape == (2, BANDS, 1280 // HOP)
    assert torch.allclose(mels, torch.tensor(LOG_FLOOR))


def test_a_tone_lights_the_band_of_its_frequency() -> None:
    time = torch.arange(16_000) / 16_000
    strongest = [int(log_mel(torch.sin(2 * torch.pi * f * time))[:, 50].argmax()) for f in (300, 1000, 4000)]
    expected = [int(filterbank()[:, round(f * 1024 / 16_000)].argmax()) for f in (300, 1000, 4000)]
    assert strongest == expected


def test_length_that_is_no_multiple_of_the_hop_is_refused() -> None:
    with pytest.raises(ValueError, match="161 samples"):
        log_mel(torch.zeros(161))


def test_magnitudes_reproduce_their_mel() -> None:
    mels = log_mel(torch.from_numpy(voice_like(0.64)))
    again = torch.log(filterbank() @ linear_magnitude(mels) + 1e-3)
    assert float((again - mels).abs().mean()) < 0.05


def test_griffin_lim_restores_the_spectrum_and_the_length() -> None:
    samples = torch.from_numpy(voice_like(0.64))
    mels = log_mel(samples)[None]
    restored = griffin_lim(mels)
    assert restored.shape == (1, len(samples))
    assert float((log_mel(restored) - mels).abs().mean()) < 0.3
    assert np.array_equal(restored.numpy(), griffin_lim(mels).numpy())
