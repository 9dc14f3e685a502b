"""Teachers: the fallback hears what is said and not how, the written one belongs to its clips."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from ernie5.tokenizers.audio.clips import Clips, MelStream
from ernie5.tokenizers.audio.codec import FRAME
from ernie5.tokenizers.audio.mel import LOG_FLOOR, log_mel
from ernie5.tokenizers.audio.teacher import (
    TEACHER_FILE,
    CepstralTeacher,
    WrittenTeacher,
    digest,
    find_teacher,
    whisper_mels,
)
from tests.tokenizers.audio.clips import voice_like, write_clips


def test_the_fallback_ignores_loudness_and_channel() -> None:
    teacher = CepstralTeacher()
    samples = torch.from_numpy(voice_like(1.28))
    mels = log_mel(samples)
    features = teacher.of(0, mels)
    assert features is not None
    assert features.shape == (mels.shape[-1] // FRAME, teacher.width)
    tilted = (mels + torch.linspace(0.8, -0.4, 80)[:, None]).clamp(min=LOG_FLOOR)
    other = teacher.of(0, log_mel(torch.from_numpy(voice_like(1.28, seed=5))))
    changed = teacher.of(0, tilted)
    assert other is not None
    assert changed is not None
    alike, apart = (F.cosine_similarity(features, x, dim=1).median() for x in (changed, other))
    assert alike > 0.9 > apart
    assert teacher.of(0, torch.full((80, 16), LOG_FLOOR)) is None


def test_the_front_end_of_whisper_lights_the_band_of_a_tone() -> None:
    time = torch.arange(16_000) / 16_000
    mels = whisper_mels(0.5 * torch.sin(2 * torch.pi * 1000 * time))
    assert mels.shape == (80, 3000)
    # 1 kHz is the fifteenth of 45.2 mels to 8 kHz; silence is cut 8 decades below the peak, over 4.
    assert int(mels[:, 50].argmax()) == pytest.approx(15 / 45.2 * 81 - 1, abs=1)
    assert float(mels.max() - mels.min()) == pytest.approx(2.0, abs=1e-4)


def test_written_features_reach_the_batches_of_their_clips_only(tmp_path: Path) -> None:
    write_clips(tmp_path / "clips.npz")
    clips = Clips.load(tmp_path)
    assert isinstance(find_teacher(tmp_path, clips), CepstralTeacher)
    frames = -(-np.diff(clips.offsets) // 1280)
    frames[1] = 0  # never asked about
    offsets = np.cumsum([0, *frames])
    features = torch.arange(int(offsets[-1]), dtype=torch.float16)[:, None].repeat(1, 3)
    tensors = {"features": features, "offsets": torch.from_numpy(offsets)}
    save_file(tensors, tmp_path / TEACHER_FILE, metadata={"clips": digest(clips)})
    teacher = find_teacher(tmp_path, clips)
    assert isinstance(teacher, WrittenTeacher)
    stream = MelStream.of(clips, np.arange(3), teacher)
    assert (
        stream.known.tolist()
        == [True] * frames[0] + [False] * len(stream.known[frames[0] : -frames[2]]) + [True] * frames[2]
    )
    assert stream.teacher[: frames[0], 0].tolist() == list(range(frames[0]))
    batch = stream.batch(8, 32, 1.0, np.random.default_rng(0))
    assert batch.teacher.shape == (8, 4, 3)
    assert batch.known.any()
    write_clips(tmp_path / "more.npz", seed=7)
    with pytest.raises(ValueError, match="other clips"):
        find_teacher(tmp_path, Clips.load(tmp_path))
