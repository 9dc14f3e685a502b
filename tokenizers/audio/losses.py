"""Distances between sounds that training takes gradients of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ernie5.tokenizers.audio.mel import log_mel

_STFT_SIZES = (128, 512, 2048)


def spectral_loss(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Multi-resolution STFT loss (Yamamoto et al., 2020) plus log-mel distance; the latter also alone.

    ``output`` and ``target`` are samples, float32 ``[B, N]``.
    """
    loss = output.new_zeros(())
    for size in _STFT_SIZES:
        window = torch.hann_window(size, device=output.device)
        made, true = (
            torch.stft(x, size, size // 4, size, window, return_complex=True).abs() for x in (output, target)
        )
        convergence = (made - true).norm() / (true.norm() + 1e-4)
        loss = loss + convergence + F.l1_loss((made + 1e-2).log(), (true + 1e-2).log())
    distance = F.l1_loss(log_mel(output), log_mel(target))
    return loss / len(_STFT_SIZES) + distance, distance.item()
