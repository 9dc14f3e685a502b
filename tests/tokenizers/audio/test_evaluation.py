"""What stands beside the codec, and what its first level is asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ernie5.tokenizers.audio import baselines, clips
from ernie5.tokenizers.audio.clips import Clips
from ernie5.tokenizers.audio.codec import MelCodec
from ernie5.tokenizers.audio.evaluation import first_level_reading
from ernie5.tokenizers.audio.mel import LOG_FLOOR, log_mel
from tests.tokenizers.audio.clips import voice_like, write_clips


@pytest.mark.skipif(not baselines.available(), reason="FFmpeg with libopus and libcodec2 is not installed")
@pytest.mark.parametrize("baseline", baselines.BASELINES, ids=lambda baseline: baseline.name)
def test_other_codecs_give_the_clips_back_in_time(baseline: baselines.Baseline) -> None:
    samples = torch.stack([torch.from_numpy(voice_like(0.8, seed=seed)) for seed in range(6)])
    decoded, rate = baselines.through(baseline, samples)
    assert decoded.shape == samples.shape
    nominal = {"codec2_700c": 700, "codec2_1200": 1200, "codec2_1300": 1300}.get(baseline.name)
    if nominal:
        # Frames of 28, 48 and 52 bits fill whole bytes, and the file has a header.
        assert nominal < rate < 1.2 * nominal
    loudness = [log_mel(x).exp().sum(1) for x in (samples, decoded)]
    alike = np.corrcoef(*(x.flatten().numpy() for x in loudness))[0, 1]
    assert alike > 0.6


def test_changed_spectra_keep_silence_and_the_middle_warp_changes_nothing() -> None:
    silent = torch.full((4, 80, 16), LOG_FLOOR)
    assert torch.allclose(clips._changed(silent, np.random.default_rng(0)), silent, atol=1e-4)
    warps = clips._warps()
    assert torch.allclose(warps[8], torch.eye(80), atol=1e-4)
    peak = torch.zeros(80)
    peak[40] = 1.0
    assert int((warps[0] @ peak).argmax()) < 40 < int((warps[-1] @ peak).argmax())


def test_the_first_level_is_read_in_numbers(tmp_path: Path) -> None:
    write_clips(tmp_path / "clips.npz")
    torch.manual_seed(0)
    codec = MelCodec(MelCodec.Config(widths=(8, 8, 8), latent=8, levels=2, codebook_size=16)).eval()
    read = first_level_reading(Clips.load(tmp_path), codec, steps=3)
    assert 0 <= read["digits_right"] <= 1
    assert (read["voices"], read["_n"]) == (4, 6)
