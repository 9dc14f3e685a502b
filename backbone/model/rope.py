"""Uni-RoPE: rotary positions with three coordinates (ERNIE 5.0 report, section 2.2.3).

Pairs of neighbouring channels turn by ``coordinate * theta ** (-2 i / D)``. The low-frequency pairs turn with
t; the others alternate between h and w (ERNIE 4.5-VL's 22 + 22 + 20 of 64). Text and sound have t = h = w,
for which this is plain RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor


def coordinate_of_pair(pairs: int) -> Tensor:
    """Which coordinate (0 = t, 1 = h, 2 = w) turns each pair, highest frequency first."""
    temporal = round(pairs * 20 / 64)
    spatial = pairs - temporal
    return torch.tensor([1 + i % 2 for i in range(spatial)] + [0] * temporal)


def rotation(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Complex rotations ``[..., 1, D/2]`` for float positions ``[..., 3]``."""
    pairs = head_dim // 2
    frequency = theta ** (-torch.arange(pairs, dtype=torch.float32, device=positions.device) / pairs)
    angle = positions[..., coordinate_of_pair(pairs).to(positions.device)] * frequency
    return torch.polar(torch.ones_like(angle), angle).unsqueeze(-2)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn ``[..., H, D]`` by complex ``[..., 1, D/2]``, in float32, back in the input's dtype.

    Rotations as real ``[..., 1, D/2, 2]`` (cosine, sine) do the same, for compilers that know no complex
    numbers.
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    if rotation.is_complex():
        return torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(-2).to(x.dtype)
    (real, imaginary), (cosine, sine) = pairs.unbind(-1), rotation.unbind(-1)
    turned = (real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return torch.stack(turned, -1).flatten(-2).to(x.dtype)
