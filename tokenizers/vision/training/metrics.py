"""Picture metrics: PSNR and SSIM per picture, on values in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def psnr(left: Tensor, right: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of ``[B, C, H, W]`` pairs, ``[B]`` (100 dB where equal)."""
    return -10 * torch.log10(((left - right) ** 2).mean((1, 2, 3)) + 1e-10)


def ssim(left: Tensor, right: Tensor) -> Tensor:
    """Structural similarity (Wang 2004: 11x11 Gaussian, sigma 1.5) of ``[B, C, H, W]`` pairs, ``[B]``."""
    channels = left.shape[1]
    offsets = torch.arange(11, dtype=left.dtype, device=left.device) - 5
    profile = torch.exp(-(offsets**2) / (2 * 1.5**2))
    profile = profile / profile.sum()
    rows = profile.view(1, 1, 11, 1).expand(channels, 1, 11, 1)
    columns = profile.view(1, 1, 1, 11).expand(channels, 1, 1, 11)

    def blur(x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, rows, groups=channels), columns, groups=channels)

    mean_left, mean_right = blur(left), blur(right)
    variance_left = blur(left * left) - mean_left**2
    variance_right = blur(right * right) - mean_right**2
    covariance = blur(left * right) - mean_left * mean_right
    c1, c2 = 0.01**2, 0.03**2
    similarity = ((2 * mean_left * mean_right + c1) * (2 * covariance + c2)) / (
        (mean_left**2 + mean_right**2 + c1) * (variance_left + variance_right + c2)
    )
    return similarity.mean((1, 2, 3))


def bit_entropies(codes: Tensor, bits: int) -> Tensor:
    """Marginal entropy of each bit of ``codes`` [...], float64 ``[bits]``: 1 if set half the time."""
    shifts = torch.arange(bits, device=codes.device)
    share = ((codes.flatten().unsqueeze(-1) >> shifts) & 1).double().mean(0).clamp(1e-9, 1 - 1e-9)
    return -(share * share.log2() + (1 - share) * (1 - share).log2())
