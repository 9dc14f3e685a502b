"""The training form of the multi-scale bit quantiser: straight-through gradients, and bits kept in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels.scales import gain_of

# Weight of the coarsest scale's balance relative to the finest one's: coarse bits die first.
_COARSE_EMPHASIS = 6.0
_SHARPNESS = 3.0
_MEMORY = 0.98


@dataclass(frozen=True, slots=True)
class QuantisedBatch:
    """``total`` [B, d, h, w] carries gradients to the latent; the two losses are scalars."""

    total: Tensor
    balance_loss: Tensor
    commitment_loss: Tensor


class BitBalance:
    """Running shares of set bits, by grid, scale and channel.

    A batch of ten pictures has ten samples of the coarsest bits, too few to tell which of them are always
    set. The entropy of a bit's share m has the derivative log((1 - m) / m), so the running share gives the
    direction and the batch only the gradient.
    """

    def __init__(self) -> None:
        self.shares: dict[tuple[int, int], Tensor] = {}

    def loss(self, soft: Sequence[Tensor], grid: tuple[int, int]) -> Tensor:
        """Take in the batch's mean soft bits, ``[d]`` a scale, coarsest first; the descent to balance."""
        now = torch.stack(list(soft))
        if grid not in self.shares:
            self.shares[grid] = torch.full_like(now.detach(), 0.5)
        share = self.shares[grid].lerp_(now.detach(), 1 - _MEMORY).clamp(0.01, 0.99)
        steps = torch.linspace(1, 0, len(now)) if len(now) > 1 else torch.zeros(1)
        slope = torch.log(share / (1 - share)) * (_COARSE_EMPHASIS**steps)[:, None]
        return (now * slope).mean()

    def state(self) -> dict[str, Tensor]:
        return {f"{height}x{width}": share for (height, width), share in self.shares.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, share in state.items():
            height, width = name.split("x")
            self.shares[int(height), int(width)] = share


def quantise_straight_through(
    latent: Tensor,
    schedule: Sequence[tuple[int, int]],
    kept: Tensor | None = None,
    bits: Tensor | None = None,
    balance: BitBalance | None = None,
) -> QuantisedBatch:
    """Quantise ``latent`` [B, d, h, w] as :func:`ernie5.kernels.scales.quantise` does, with gradients.

    Args:
        latent: at the scale of all d bits.
        schedule: grids, coarsest first.
        kept: [B] int, how many coarse scales of each picture enter its total (all if None); the dropped ones
            teach the decoder to draw from a prefix, and the encoder to put meaning into coarse scales.
        bits: [B] int, how many channels of each picture enter its total (all if None).
        balance: of the run; without it the balance loss is 0.
    """
    channels, grid = latent.shape[1], (latent.shape[-2], latent.shape[-1])
    residual, total = latent, torch.zeros_like(latent)
    commitment = latent.new_zeros(())
    soft = []
    for scale, size in enumerate(schedule):
        # Not divided by the cell's norm first, as the method has it: that ties the channels to each other,
        # and those that only the larger widths use would be pushed towards zero by the others.
        pooled = F.adaptive_avg_pool2d(residual, size)
        level = torch.where(pooled >= 0, 1.0, -1.0) * (gain_of(scale) / channels**0.5)
        commitment = commitment + F.mse_loss(pooled, level) * channels / len(schedule)
        soft.append(torch.sigmoid(pooled / level.abs() * _SHARPNESS).mean((0, 2, 3)))
        through = pooled + (level - pooled).detach()
        added = F.interpolate(through, size=grid, mode="bilinear", align_corners=False)
        residual = residual - added.detach()
        total = total + (added if kept is None else added * (kept > scale).view(-1, 1, 1, 1))
    if bits is not None:
        total = total * (torch.arange(channels) < bits[:, None])[:, :, None, None]
    loss = latent.new_zeros(()) if balance is None else balance.loss(soft, grid)
    return QuantisedBatch(total, loss, commitment)
