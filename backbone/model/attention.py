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


class Attention(nn.Module):
    """Query, key and value in one projection, no biases."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = config.heads, config.key_heads, config.head_dim
        self.qkv = nn.Parameter(
            torch.empty((config.heads + 2 * config.key_heads) * config.head_dim, config.width)
        )
        self.out = nn.Parameter(torch.empty(config.width, config.heads * config.head_dim))

    def forward(self, x_BNd: Tensor, rotation: Tensor, attend: Attend, layer: int) -> Tensor:
        batch, length, _ = x_BNd.shape
        dtype = x_BNd.dtype
        joined = F.linear(x_BNd, self.qkv.to(dtype)).view(batch, length, -1, self.head_dim)
        query, key, value = joined.split([self.heads, self.key_heads, self.key_heads], 2)
        mixed = attend(layer, rotate(query, rotation), rotate(key, rotation), value)
        return F.linear(mixed.reshape(batch, length, -1), self.out.to(dtype))
