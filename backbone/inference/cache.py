"""Keys and values of all requests in flight, in fixed slots."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig


class KeyValueCache:
    """Per layer ``[slots, length, Hk, D]`` keys and values, and which rows a column is hidden from.

    ``hidden`` int64 ``[slots, length, 2]``: rows in [start, end) don't see the column (sparse audio).
    """

    def __init__(
        self,
        config: BackboneConfig,
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.layers, slots, length, config.key_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.hidden = torch.zeros(slots, length, 2, dtype=torch.long, device=device)
        self.free = list(range(slots - 1, -1, -1))
        self.length = length

    def write(self, layer: int, slots: Tensor, start: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``[b, n, Hk, D]`` at positions ``start .. start + n`` of each slot."""
        place = start[:, None] + torch.arange(key.shape[1], device=start.device)
        self.keys[layer][slots[:, None], place] = key.to(self.keys.dtype)
        self.values[layer][slots[:, None], place] = value.to(self.values.dtype)

    def visible(self, slots: Tensor, start: Tensor, count: int, width: int) -> Tensor:
        """Which of the first ``width`` cached columns the new rows see: bool ``[b, 1, count, width]``.

        New rows see one another in both directions: a chunk is one position or one scale block. ``width`` is
        the greatest ``start`` plus ``count``, which the caller knows without waiting for a device.
        """
        column = torch.arange(width, device=start.device)
        row = start[:, None] + torch.arange(count, device=start.device)
        seen = (column < (start + count)[:, None])[:, None, :].expand(-1, count, -1)
        hidden = self.hidden[slots, :width]
        inside = (row[:, :, None] >= hidden[:, None, :, 0]) & (row[:, :, None] < hidden[:, None, :, 1])
        return (seen & ~inside)[:, None]

    def attend(self, layer: int, query: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        """Attention of ``[b, n, H, D]`` queries over the cached columns of their slots."""
        width = visible.shape[-1]
        groups = query.shape[2] // self.keys.shape[3]
        key = self.keys[layer][slots, :width].transpose(1, 2).to(query.dtype)
        value = self.values[layer][slots, :width].transpose(1, 2).to(query.dtype)
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=visible)
        return out.transpose(1, 2)
