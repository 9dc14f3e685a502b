"""The portable backend: panels of 64 query rows, each against the hull of the columns it sees.

Panels whose hulls are equally wide (rounded to 64 columns) run as one batched
``scaled_dot_product_attention``. Packed rows of short documents have hulls of a few hundred columns, so the
cost grows with the visible area and not with N^2. Masks of buckets are kept in the plan while they are
small, so all layers share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels.flashmask.plan import BLOCK, MaskPlan

_KEEP_MASK_BELOW = 64 << 20  # elements of all bucket masks of one plan


@dataclass(frozen=True)
class _Bucket:
    """Panels of one hull width: flat query rows ``[P, 64]``, flat key rows ``[P, W]``, bounds ``[P]``."""

    query_rows: Tensor
    key_rows: Tensor
    batch: Tensor
    first_row: Tensor
    first_column: Tensor


def panel_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, softmax_scale: float | None = None
) -> Tensor:
    """Attention under ``plan``; ``[B, Nq, H, D]`` queries, ``[B, Nk, Hk, D]`` keys and values.

    Rows that see nothing give 0. One mask head only (all heads share the mask).
    """
    batch, rows, heads, width = query.shape
    columns, key_heads = key.shape[1], key.shape[2]
    if plan.intervals.shape[1] != 1:
        raise NotImplementedError("the panel backend takes masks that all heads share")
    buckets = plan._cache.get("buckets")
    if buckets is None:
        buckets = plan._cache["buckets"] = _buckets(plan, columns)
    flat_query = query.reshape(batch * rows, heads, width)
    flat_key = key.reshape(batch * columns, key_heads, width)
    flat_value = value.reshape(batch * columns, key_heads, width)
    groups = heads // key_heads
    pieces, places = [], []
    for index, bucket in enumerate(buckets):
        visible, seen = _bucket_mask(plan, index, bucket, columns)
        q = flat_query.index_select(0, bucket.query_rows.flatten())
        k = flat_key.index_select(0, bucket.key_rows.flatten())
        v = flat_value.index_select(0, bucket.key_rows.flatten())
        panels, hull = bucket.key_rows.shape
        q = q.view(panels, BLOCK, heads, width).transpose(1, 2)
        k = k.view(panels, hull, key_heads, width).transpose(1, 2)
        v = v.view(panels, hull, key_heads, width).transpose(1, 2)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=softmax_scale)
        out = out * seen.to(out.dtype) if not bool(seen.all()) else out
        pieces.append(out.transpose(1, 2).reshape(panels * BLOCK, heads, width))
        places.append(bucket.query_rows.flatten())
    if len(pieces) == 1 and rows % BLOCK == 0:
        return pieces[0].view(batch, rows, heads, width)
    order = plan._cache.get("order")
    if order is None:
        # Where each query row lies in the concatenated panels; padded rows of a last panel are left out.
        place = torch.cat(places)
        valid = torch.cat([(b.first_row[:, None] + torch.arange(BLOCK) < rows).flatten() for b in buckets])
        order = torch.empty(batch * rows, dtype=torch.long)
        order[place[valid]] = torch.arange(len(place))[valid]
        plan._cache["order"] = order
    return torch.cat(pieces).index_select(0, order).view(batch, rows, heads, width)


def _buckets(plan: MaskPlan, columns: int) -> list[_Bucket]:
    tiles = plan.tiles[:, 0]
    blocks = tiles.shape[-1]
    index = torch.arange(blocks)
    low = torch.where(tiles, index, blocks).amin(-1)
    high = torch.where(tiles, index + 1, 0).amax(-1)
    empty = high <= low
    low, high = torch.where(empty, 0, low), torch.where(empty, 1, high)
    span = high - low
    out = []
    for width in span.unique().tolist():
        b, panel = (span == width).nonzero(as_tuple=True)
        first_row, first_column = panel * BLOCK, low[b, panel] * BLOCK
        query_rows = (first_row[:, None] + torch.arange(BLOCK)).clamp(max=plan.rows - 1)
        key_rows = (first_column[:, None] + torch.arange(width * BLOCK)).clamp(max=columns - 1)
        out.append(
            _Bucket(
                query_rows + b[:, None] * plan.rows,
                key_rows + b[:, None] * columns,
                b,
                first_row,
                first_column,
            )
        )
    return out


def _bucket_mask(plan: MaskPlan, index: int, bucket: _Bucket, columns: int) -> tuple[Tensor, Tensor]:
    """Visibility ``[P, 1, 64, W]`` (rows that see nothing see all, to keep softmax finite) and whether a
    row sees anything, ``[P, 1, 64, 1]``."""
    name = f"mask{index}"
    if name in plan._cache:
        return plan._cache[name]
    panels, hull = bucket.key_rows.shape
    start, end = plan.intervals[:, 0].flatten(0, 1)[bucket.key_rows.flatten()].unbind(-1)
    start, end = start.view(panels, 1, hull, -1), end.view(panels, 1, hull, -1)
    row = (bucket.first_row[:, None] + torch.arange(BLOCK))[:, :, None].int()
    visible = (bucket.first_column[:, None] + torch.arange(hull) < columns)[:, None, :].expand(-1, BLOCK, -1)
    visible = visible.clone()
    for k in range(start.shape[-1]):
        visible &= (row < start[..., k]) | (row >= end[..., k])
    seen = visible.any(-1, keepdim=True)
    visible |= ~seen
    result = (visible[:, None], seen[:, None])
    kept = plan._cache.get("kept", 0) + visible.numel()
    if kept <= _KEEP_MASK_BELOW:
        plan._cache["kept"] = kept
        plan._cache[name] = result
    return result
