"""Grouped-query attention with rotary positions; how keys are seen is left to the caller."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.model.rope import rotate

# (layer, query [B, N, H, D], key [B, N, Hk, D], value) -> [B, N, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def attention_inputs(
    x: Tensor,
    turn: Tensor,
    norm_d: Tensor,
    qkv: Tensor,
    epsilon: float,
    heads: int,
    key_heads: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projections and rotation: ``[..., d]`` to query ``[..., H, D]``, key and value ``[..., Hk, D]``.

    Args:
        turn: ``[..., 1, D/2]``, see :func:`~ernie5.backbone.model.rope.rotate`.
        norm_d: weight of the norm.
        qkv: ``[(H + 2 Hk) D, d]``, cast to ``dtype``, that of the products.
    """
    normed = F.rms_norm(x, x.shape[-1:], norm_d, epsilon).to(dtype)
    joined = F.linear(normed, qkv.to(dtype)).unflatten(-1, (heads + 2 * key_heads, -1))
    query, key, value = joined.split([heads, key_heads, key_heads], -2)
    return rotate(query, turn), rotate(key, turn), value


def attention_outputs(
    x: Tensor, mixed: Tensor, out: Tensor, norm_d: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Projection of ``mixed`` ``[..., H, D]``, residual sum float32 ``[..., d]``, and its norm in ``dtype``.

    Args:
        out: ``[d, H D]``.
        norm_d: weight of the norm before the feed-forward.
    """
    x = x + F.linear(mixed.flatten(-2), out.to(dtype)).float()
    return x, F.rms_norm(x, x.shape[-1:], norm_d, epsilon).to(dtype)


class Attention(nn.Module):
    """Weights of the projections: query, key and value in one, no biases."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = config.heads, config.key_heads, config.head_dim
        self.qkv = nn.Parameter(
            torch.empty((config.heads + 2 * config.key_heads) * config.head_dim, config.width)
        )
        self.out = nn.Parameter(torch.empty(config.width, config.heads * config.head_dim))
