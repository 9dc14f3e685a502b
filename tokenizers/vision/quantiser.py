"""The training form of the multi-scale bit quantiser: straight-through gradients and its two regularisers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels.scales import gain_of

# Entropy weight of the coarsest scale relative to the finest. Coarse scales give few samples a batch and
# their bits die first (measured: 0.7 bits of 1 at 1x1 with equal weights).
_COARSE_EMPHASIS = 6.0
_SHARPNESS = 3.0


@dataclass(frozen=True, slots=True)
class QuantisedBatch:
    """``total`` [B, d, h, w] carries gradients to the latent; the two losses are scalars."""

    total: Tensor
    entropy_loss: Tensor
    commitment_loss: Tensor


def quantise_straight_through(
    latent: Tensor, schedule: Sequence[tuple[int, int]], kept: Tensor | None = None
) -> QuantisedBatch:
    """Quantise ``latent`` [B, d, h, w] as :func:`ernie5.kernels.scales.quantise` does, with gradients.

    ``kept`` [B] int: how many coarse scales of each picture enter its total (all if None); the dropped ones
    teach the decoder to draw from a prefix, and the encoder to put meaning into coarse scales.
    """
    bits, grid = latent.shape[1], latent.shape[-2:]
    residual, total = latent, torch.zeros_like(latent)
    entropy = latent.new_zeros(())
    commitment = latent.new_zeros(())
    last = max(len(schedule) - 1, 1)
    for scale, size in enumerate(schedule):
        unit = F.normalize(F.adaptive_avg_pool2d(residual, size), dim=1)
        level = torch.where(unit >= 0, 1.0, -1.0) / bits**0.5
        commitment = commitment + F.mse_loss(unit, level) * bits / len(schedule)
        emphasis = _COARSE_EMPHASIS ** ((last - scale) / last)
        entropy = entropy - emphasis * _batch_entropy(unit) / len(schedule)
        through = unit + (level - unit).detach()
        added = F.interpolate(through, size=grid, mode="bilinear", align_corners=False) * gain_of(scale)
        residual = residual - added.detach()
        total = total + (added if kept is None else added * (kept > scale).view(-1, 1, 1, 1))
    return QuantisedBatch(total, entropy, commitment)


def _batch_entropy(unit: Tensor) -> Tensor:
    """Mean entropy (nats) of each soft bit's mean over the batch; largest where it is set half the time."""
    bits = unit.shape[1]
    mean = torch.sigmoid(unit * bits**0.5 * _SHARPNESS).mean((0, 2, 3)).clamp(1e-6, 1 - 1e-6)
    return -(mean * mean.log() + (1 - mean) * (1 - mean).log()).mean()
