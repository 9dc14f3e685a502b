"""Waveform to log-mel and back.

The codec works on 80 log-mel bands at 100 frames a second. Two ways lead back to sound: the trained
vocoder (:mod:`ernie5.tokenizers.audio.vocoder`), which ships, and :func:`griffin_lim`, the plain reference
beside it.

Shapes: ``B`` clips, ``N`` samples, ``T = N / HOP`` frames, ``F = FFT // 2 + 1`` frequencies.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLE_RATE = 16_000
HOP = 160
FFT = 1024
WINDOW = 640
BANDS = 80
LOWEST_HZ, HIGHEST_HZ = 20.0, 7_900.0
# Part of the definition of every log-mel distance: a lower floor counts differences of silences.
FLOOR = 1e-3
LOG_FLOOR = float(np.log(FLOOR))

_EPSILON = 1e-8


@cache
def filterbank() -> Tensor:
    """Triangular filters evenly spaced in mel (O'Shaughnessy), each with unit sum; float32 ``[BANDS, F]``."""

    def to_mel(hertz: float) -> float:
        return 2595.0 * float(np.log10(1.0 + hertz / 700.0))

    edges = 700.0 * (10.0 ** (np.linspace(to_mel(LOWEST_HZ), to_mel(HIGHEST_HZ), BANDS + 2) / 2595.0) - 1.0)
    frequencies = np.linspace(0.0, SAMPLE_RATE / 2, FFT // 2 + 1)
    filters = np.zeros((BANDS, len(frequencies)))
    for band, (low, centre, high) in enumerate(zip(edges, edges[1:], edges[2:])):
        rising = (frequencies - low) / (centre - low)
        falling = (high - frequencies) / (high - centre)
        filters[band] = np.maximum(0.0, np.minimum(rising, falling))
    filters /= np.maximum(filters.sum(axis=1, keepdims=True), 1e-6)
    with torch.inference_mode(False):
        return torch.from_numpy(filters.astype(np.float32))


@cache
def inverse_filterbank() -> Tensor:
    """Pseudo-inverse of :func:`filterbank`, float32 ``[F, BANDS]``."""
    with torch.inference_mode(False):
        return torch.linalg.pinv(filterbank().double()).float()


@cache
def window() -> Tensor:
    """The analysis and synthesis window, float32 ``[WINDOW]``."""
    # Cached tensors outlive the call: made under inference mode, later backward passes would refuse them.
    with torch.inference_mode(False):
        return torch.hann_window(WINDOW)


def stft(samples: Tensor) -> Tensor:
    """Complex spectrum ``[..., F, N / HOP + 1]`` of ``samples`` ``[..., N]``, surrounded by silence.

    Silence, not reflection, so that a clip's edge looks as if the clip lay in a pause.
    """
    return torch.stft(
        samples,
        FFT,
        HOP,
        WINDOW,
        window().to(samples.device),
        center=True,
        pad_mode="constant",
        return_complex=True,
    )


def istft(spectrum: Tensor) -> Tensor:
    """Samples ``[..., N]`` of a complex spectrum ``[..., F, N / HOP + 1]``; inverse of :func:`stft`."""
    return torch.istft(spectrum, FFT, HOP, WINDOW, window().to(spectrum.device), center=True)


def log_mel(samples: Tensor) -> Tensor:
    """Natural logarithm of the mel magnitudes plus ``FLOOR``.

    Args:
        samples: float32 ``[..., N]`` at 16 kHz, N a multiple of ``HOP``.

    Returns:
        float32 ``[..., BANDS, N / HOP]``.
    """
    if samples.shape[-1] % HOP:
        raise ValueError(f"{samples.shape[-1]} samples are not a multiple of the hop {HOP}")
    magnitude = stft(samples)[..., :-1].abs()
    return torch.log(filterbank().to(samples.device) @ magnitude + FLOOR)


def framed_log_mel(samples: Tensor) -> Tensor:
    """Log-mels ``[BANDS, T]`` of samples ``[(T - 1) * HOP + FFT]`` that reach half a transform beyond the
    frames' centres on either side: what :func:`log_mel` gives in the middle of a clip.
    """
    spectrum = torch.stft(
        samples, FFT, HOP, WINDOW, window().to(samples.device), center=False, return_complex=True
    )
    return torch.log(filterbank().to(samples.device) @ spectrum.abs() + FLOOR)


def linear_magnitude(log_mels: Tensor, refinements: int = 10) -> Tensor:
    """Non-negative magnitudes ``[..., F, T]`` whose mel bands match ``log_mels`` ``[..., BANDS, T]``.

    Starts from the pseudo-inverse and refines it by multiplicative updates of non-negative least squares
    (Lee and Seung, 2001).
    """
    filters = filterbank().to(log_mels.device)
    target = (log_mels.exp() - FLOOR).clamp(min=0.0)
    magnitude = (inverse_filterbank().to(log_mels.device) @ target).clamp(min=1e-5)
    for _ in range(refinements):
        magnitude = magnitude * ((filters.T @ target) / (filters.T @ (filters @ magnitude) + _EPSILON))
    return magnitude


def griffin_lim(log_mels: Tensor, iterations: int = 32, momentum: float = 0.99, seed: int = 0) -> Tensor:
    """Samples ``[B, T * HOP]`` of ``log_mels`` ``[B, BANDS, T]`` by phase retrieval.

    The fast Griffin-Lim algorithm (Perraudin et al., 2013) from random phases drawn with ``seed``. Clips
    are inverted one by one: the working set then stays in the processor's cache, which is several
    times faster than one large batch.
    """
    return torch.stack([_griffin_lim_one(clip, iterations, momentum, seed) for clip in log_mels])


def _griffin_lim_one(log_mels: Tensor, iterations: int, momentum: float, seed: int) -> Tensor:
    magnitude = F.pad(linear_magnitude(log_mels), (0, 1))
    generator = torch.Generator().manual_seed(seed)
    phase = torch.exp(2j * torch.pi * torch.rand(magnitude.shape, generator=generator)).to(log_mels.device)
    previous: Tensor | float = 0.0
    for _ in range(iterations):
        consistent = stft(istft(magnitude * phase))
        accelerated = consistent - momentum / (1.0 + momentum) * previous
        phase = accelerated / (accelerated.abs() + _EPSILON)
        previous = consistent
    return istft(magnitude * phase)
