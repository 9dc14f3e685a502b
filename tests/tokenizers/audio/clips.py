"""Sounds that the audio tests share: made here, so that each test knows what is in them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import soundfile


def voice_like(seconds: float, rate: int = 16_000, seed: int = 0) -> np.ndarray:
    """A gliding harmonic tone with pauses and some noise, float32 in [-1, 1]."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    phase = 2 * np.pi * np.cumsum(110 + 40 * np.sin(2 * np.pi * time + seed)) / rate
    tone = sum(np.sin(k * phase) / k for k in range(1, 12))
    envelope = np.clip(np.sin(2 * np.pi * 2.5 * time + seed), 0, 1)
    return (0.2 * tone * envelope + 0.003 * random.standard_normal(len(time))).astype(np.float32)


def encoded(
    samples: np.ndarray, rate: int = 16_000, container: str = "WAV", subtype: str | None = None
) -> bytes:
    """``samples`` ``[n]`` or ``[n, channels]`` as a file's bytes."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype, format=container)
    return file.getvalue()


def write_clips(path: Path, clips: int = 24, seed: int = 0) -> None:
    """A small training file of digit-labelled clips; the last quarter is held out."""
    sounds = [voice_like(0.3 + 0.05 * (i % 5), seed=seed + i) for i in range(clips)]
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    np.savez(
        path,
        a=np.concatenate([(sound * 32767).astype(np.int16) for sound in sounds]),
        off=np.cumsum([0] + [len(sound) for sound in sounds]),
        kind=np.array(["made"] * clips),
        lang=np.array(["en"] * clips),
        voice=np.array([f"voice-{i % 4}" for i in range(clips)]),
        label=np.array([words[i % 10] for i in range(clips)]),
        split=np.array(["train"] * (clips - clips // 4) + ["test"] * (clips // 4)),
    )
