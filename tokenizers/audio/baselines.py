"""Speech codecs to compare with, through FFmpeg: Opus at its lowest rate, and Codec 2.

Their rates: Codec 2 has 700, 1200, 1300 bit/s and more, for 8 kHz telephone sound; Opus starts near 6 kbit/s.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from torch import Tensor

from ernie5.protocol.errors import UnavailableError
from ernie5.tokenizers.audio.mel import SAMPLE_RATE

_GAP = 4_800  # samples of silence between clips, so that none reaches into the next
_LONGEST_DELAY = 2_400


@dataclass(frozen=True, slots=True)
class Baseline:
    """A codec: FFmpeg's options, the container, and the sample rate it works at."""

    name: str
    options: tuple[str, ...]
    suffix: str
    rate: int


BASELINES: tuple[Baseline, ...] = (
    Baseline("codec2_700c", ("-c:a", "libcodec2", "-mode", "700C"), ".c2", 8_000),
    Baseline("codec2_1200", ("-c:a", "libcodec2", "-mode", "1200"), ".c2", 8_000),
    Baseline("codec2_1300", ("-c:a", "libcodec2", "-mode", "1300"), ".c2", 8_000),
    Baseline("opus_6k", ("-c:a", "libopus", "-b:a", "6k", "-application", "voip"), ".ogg", 16_000),
    Baseline("opus_12k", ("-c:a", "libopus", "-b:a", "12k", "-application", "voip"), ".ogg", 16_000),
)


def available() -> bool:
    """Whether FFmpeg is there, with both codecs."""
    program = shutil.which("ffmpeg")
    if program is None:
        return False
    listed = subprocess.run([program, "-hide_banner", "-encoders"], capture_output=True, text=True).stdout
    return "libopus" in listed and "libcodec2" in listed


def through(baseline: Baseline, clips: Tensor) -> tuple[Tensor, float]:
    """Clips ``[B, N]`` at 16 kHz after the codec, and its bits a second with the container's.

    The clips travel as one file, silence between them; the codec's delay is taken out.

    Raises:
        UnavailableError: FFmpeg is not there, or lacks the codec.
    """
    program = shutil.which("ffmpeg")
    if program is None:
        raise UnavailableError("the program 'ffmpeg' is not on the PATH; install the Debian package ffmpeg")
    count, length = clips.shape
    joined = F.pad(clips, (0, _GAP)).flatten().numpy()
    with tempfile.TemporaryDirectory() as folder:
        source, coded, back = (
            Path(folder) / name for name in ("in.wav", f"out{baseline.suffix}", "back.wav")
        )
        soundfile.write(source, joined, SAMPLE_RATE, "PCM_16")
        quiet = [program, "-hide_banner", "-loglevel", "error", "-y"]
        steps = (
            [*quiet, "-i", str(source), "-ac", "1", "-ar", str(baseline.rate), *baseline.options, str(coded)],
            [*quiet, "-i", str(coded), "-ar", str(SAMPLE_RATE), "-ac", "1", str(back)],
        )
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise UnavailableError(f"{baseline.name}: FFmpeg fails: {done.stderr.strip()[-300:]}")
        rate = coded.stat().st_size * 8 * SAMPLE_RATE / len(joined)
        decoded, _ = soundfile.read(back, dtype="float32")
    delay = _delay(joined, decoded)
    decoded = np.concatenate([decoded[delay:], np.zeros(delay + len(joined), np.float32)])[: len(joined)]
    return torch.from_numpy(decoded.reshape(count, length + _GAP)[:, :length].copy()), rate


def _delay(original: np.ndarray, decoded: np.ndarray) -> int:
    """Samples by which ``decoded`` is late, by its loudness: parametric codecs keep no waveform."""
    size = min(len(original), len(decoded), 1 << 19)
    smooth = np.ones(80) / 80
    one, two = (np.convolve(np.abs(x[:size]), smooth, "same") for x in (original, decoded))
    spectrum = np.conj(np.fft.rfft(one - one.mean(), 2 * size)) * np.fft.rfft(two - two.mean(), 2 * size)
    return int(np.fft.irfft(spectrum)[:_LONGEST_DELAY].argmax())
