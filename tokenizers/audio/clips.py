"""Training clips of the codec: short recordings at 16 kHz with labels and splits, and batches of them.

A folder holds ``*.npz`` files with ``a`` (int16, all clips end to end), ``off`` (int64, one more than
clips), and one string a clip in ``kind`` (source, such as ``espeak``), ``lang``, ``voice``, ``label`` (what
is said) and ``split`` (``train`` or ``test``). A clip whose label is one of :data:`DIGITS` in its language
is a spoken digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ernie5.tokenizers.audio.codec import FRAME
from ernie5.tokenizers.audio.mel import BANDS, FLOOR, HOP, LOG_FLOOR, SAMPLE_RATE, filterbank, log_mel

if TYPE_CHECKING:
    from ernie5.tokenizers.audio.teacher import Teacher

FRAME_SAMPLES = FRAME * HOP

DIGITS: dict[str, tuple[str, ...]] = {
    "en": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "zh": ("零", "一", "二", "三", "四", "五", "六", "七", "八", "九"),
    "es": ("cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"),
    "fr": ("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"),
    "it": ("zero", "uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove"),
    "ru": ("ноль", "один", "два", "три", "четыре", "пять", "шесть", "семь", "восемь", "девять"),
}
_DIGIT_OF = {
    (language, word): value for language, words in DIGITS.items() for value, word in enumerate(words)
}


@dataclass(frozen=True, slots=True)
class Clips:
    """Clips end to end, with what is known of each.

    Attributes:
        samples: int16 ``[total]``.
        offsets: int64 ``[clips + 1]``.
        kind, lang, voice, split: str ``[clips]``.
        digit: int64 ``[clips]``, the spoken digit or -1.
    """

    samples: np.ndarray
    offsets: np.ndarray
    kind: np.ndarray
    lang: np.ndarray
    voice: np.ndarray
    split: np.ndarray
    digit: np.ndarray

    @classmethod
    def load(cls, path: Path) -> Clips:
        """Read an ``.npz`` file or all of a folder's; ``FileNotFoundError`` where there is none."""
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not files:
            raise FileNotFoundError(f"no .npz file of clips in {path}")
        parts = []
        for file in files:
            with np.load(file, allow_pickle=False) as archive:
                parts.append({name: archive[name] for name in archive.files})
        starts = np.cumsum([0] + [len(part["a"]) for part in parts])
        ends = [part["off"][1:] + start for part, start in zip(parts, starts)]
        columns = {
            name: np.concatenate([part[name].astype(str) for part in parts])
            for name in ("kind", "lang", "voice", "split")
        }
        labels = np.concatenate([part["label"].astype(str) for part in parts])
        return cls(
            samples=np.concatenate([part["a"] for part in parts]),
            offsets=np.concatenate([[0], *ends]).astype(np.int64),
            digit=np.array([_DIGIT_OF.get(key, -1) for key in zip(columns["lang"], labels)], dtype=np.int64),
            **columns,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def waveform(self, index: int) -> Tensor:
        """Clip ``index`` as float32 ``[n]`` in [-1, 1]."""
        clip = self.samples[self.offsets[index] : self.offsets[index + 1]]
        return torch.from_numpy(clip.astype(np.float32) / 32768.0)

    def padded(self, indices: Sequence[int] | np.ndarray, samples: int) -> Tensor:
        """Clips cut, or padded with silence at their end; float32 ``[len(indices), samples]``."""
        cut = [self.waveform(int(index))[:samples] for index in indices]
        return torch.stack([F.pad(clip, (0, samples - len(clip))) for clip in cut])


@dataclass(frozen=True, slots=True)
class MelBatch:
    """What a step trains on.

    Attributes:
        log_mels: float32 ``[B, BANDS, T]``.
        teacher: float32 ``[B, T / FRAME, W]``, what a teacher of speech makes of each latent frame.
        known: bool ``[B, T / FRAME]``, the frames that the teacher was asked about.
    """

    log_mels: Tensor
    teacher: Tensor
    known: Tensor


@dataclass(frozen=True, slots=True)
class MelStream:
    """Log-mels of some clips end to end, each padded with silence to whole latent frames.

    Attributes:
        frames: float16 ``[BANDS, total]``; hours of audio fit in memory.
        offsets: int64 ``[clips + 1]``, in mel frames.
        digits: int64, the clips that are spoken digits.
        teacher: float16 ``[total / FRAME, W]``.
        known: bool ``[total / FRAME]``, where the teacher was asked.
    """

    frames: Tensor
    offsets: np.ndarray
    digits: np.ndarray
    teacher: Tensor
    known: Tensor

    @classmethod
    def of(cls, clips: Clips, indices: np.ndarray, teacher: Teacher | None = None) -> MelStream:
        """The clips ``indices``; without a teacher, nothing is known."""
        mels, features, known = [], [], []
        for index in indices:
            samples = clips.waveform(int(index))
            mels.append(log_mel(F.pad(samples, (0, -len(samples) % FRAME_SAMPLES))).half())
            frames = mels[-1].shape[-1] // FRAME
            told = teacher.of(int(index), mels[-1]) if teacher else None
            known.append(torch.full((frames,), told is not None))
            empty = torch.zeros(frames, teacher.width if teacher else 0, dtype=torch.float16)
            features.append(empty if told is None else told.half())
        offsets = np.cumsum([0] + [mel.shape[-1] for mel in mels])
        return cls(
            torch.cat(mels, dim=-1),
            offsets,
            np.flatnonzero(clips.digit[indices] >= 0),
            torch.cat(features),
            torch.cat(known),
        )

    def batch(
        self,
        size: int,
        frames: int,
        digit_share: float,
        random: np.random.Generator,
        changed: float = 0.0,
    ) -> MelBatch:
        """Random crops of the stream and whole digit clips, ``size`` items of ``frames`` mel frames.

        Whole clips, preceded by less than a latent frame of silence and followed by silence, teach what short
        requests look like. Loudness is drawn anew for each item, and for a share ``changed`` of them the
        speaker's size and the tilt of the spectrum too (see :func:`_changed`).
        """
        whole = round(size * digit_share) if len(self.digits) else 0
        steps = frames // FRAME
        out = torch.full((size, BANDS, frames), LOG_FLOOR)
        teacher = torch.zeros(size, steps, self.teacher.shape[1])
        known = torch.zeros(size, steps, dtype=torch.bool)
        for item in range(size):
            before = 0
            if item < whole:
                clip = random.choice(self.digits)
                start, end = int(self.offsets[clip]), int(self.offsets[clip + 1])
                before = int(random.integers(0, FRAME)) if random.random() < 0.5 else 0
                length = min(end - start, frames - before)
            else:
                start = FRAME * int(random.integers(0, max(1, (self.frames.shape[-1] - frames) // FRAME)))
                length = min(frames, self.frames.shape[-1] - start)
            out[item, :, before : before + length] = self.frames[:, start : start + length]
            if before == 0:  # shifted clips straddle the teacher's frames
                first, count = start // FRAME, length // FRAME
                teacher[item, :count] = self.teacher[first : first + count]
                known[item, :count] = self.known[first : first + count]
        gain = random.normal(0.0, 0.4, (size, 1)).astype(np.float32)
        # Digital silence stays silent at any loudness; float16 rounds the floor by less than a hundredth.
        out = torch.where(out > LOG_FLOOR + 0.01, out + torch.from_numpy(gain)[..., None], out)
        number = int(random.binomial(size, changed))
        if number:
            which = torch.from_numpy(random.permutation(size)[:number])
            out[which] = _changed(out[which], random)
        return MelBatch(out.clamp(min=LOG_FLOOR), teacher, known)


@cache
def _warps() -> Tensor:
    """Matrices ``[17, BANDS, BANDS]`` that move the spectrum's frequencies by 0.84 to 1.19."""
    hertz = torch.linspace(0.0, SAMPLE_RATE / 2, filterbank().shape[1])
    centres = (filterbank() @ hertz) / filterbank().sum(1)
    matrices = []
    for factor in torch.linspace(-0.175, 0.175, 17).exp():
        # Linear interpolation between the two bands on either side of where a band's sound came from.
        position = torch.searchsorted(centres, centres / factor).clamp(1, BANDS - 1)
        low, high = centres[position - 1], centres[position]
        share = ((centres / factor - low) / (high - low)).clamp(0.0, 1.0)
        matrix = torch.zeros(BANDS, BANDS)
        rows = torch.arange(BANDS)
        matrix[rows, position - 1] = 1.0 - share
        matrix[rows, position] = share
        matrices.append(matrix)
    return torch.stack(matrices)


def _changed(log_mels: Tensor, random: np.random.Generator) -> Tensor:
    """Other speakers and rooms of ``log_mels`` ``[B, BANDS, T]``: frequencies scaled, the spectrum tilted."""
    batch = len(log_mels)
    warps = _warps()[torch.from_numpy(random.integers(0, 17, batch))]
    knots = torch.from_numpy(random.normal(0.0, 0.35, (batch, 1, 6)).astype(np.float32))
    tilt = F.interpolate(knots, BANDS, mode="linear", align_corners=True)[:, 0, :, None]
    magnitude = (log_mels.exp() - FLOOR).clamp(min=0.0)
    return torch.log(torch.bmm(warps, magnitude) * tilt.exp() + FLOOR)


def waveform_batch(
    clips: Clips,
    indices: np.ndarray,
    size: int,
    samples: int,
    digit_share: float,
    random: np.random.Generator,
) -> Tensor:
    """Random crops, float32 ``[size, samples]``, of clips in proportion to their length or, for a
    ``digit_share`` of them, of digit clips; a clip that ends early is followed by silence.
    """
    digits = indices[clips.digit[indices] >= 0]
    lengths = np.diff(clips.offsets)[indices]
    weights = lengths / lengths.sum()
    out = torch.zeros(size, samples)
    for item in range(size):
        if len(digits) and random.random() < digit_share:
            clip = clips.waveform(int(random.choice(digits)))
        else:
            clip = clips.waveform(int(random.choice(indices, p=weights)))
        start = int(random.integers(0, max(1, len(clip) - samples // 2)))
        crop = clip[start : start + samples]
        out[item, : len(crop)] = crop * float(np.exp(random.normal(0.0, 0.4)))
    return out.clamp(-1.0, 1.0)
