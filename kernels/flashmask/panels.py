"""The portable backend: panels of 64 query rows, each against the tiles of columns that it sees.

Panels that see equally many tiles run as one batched product, so packed rows of short documents take a few
large operations and the cost grows with the visible area. As in FlashAttention (Dao et al., arXiv 2205.14135)
only the log-sum-exp is kept, and the backward pass computes the weights again. Everything is float32, or
float64 for float64 inputs. Masks of partly visible panels are numbers to add, which on CPUs takes a tenth of
the time of filling by a boolean mask; small plans keep them.

That way a hidden number that is not finite spoils what it is added to and multiplied with, and shows in the
result. A result that is not finite is therefore computed again, ``strict``: hidden pairs are left out by
selection, slowly. The native backend does the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import threshold

from ernie5.kernels.flashmask.plan import BLOCK, MaskPlan
from ernie5.kernels.flashmask.visible import visible_sum

_SCORES = 1 << 20  # scores computed at once: a few MiB, which stay in a cache
_KEEP_BELOW = 16 << 20  # scores of one head; a plan with fewer keeps its panels with their masks
_LOWEST = -80.0  # weights below exp(-80) times the greatest are 0, well below float64's precision


@dataclass(frozen=True, eq=False)
class _Panels:
    """P panels of R rows that see W columns.

    Attributes:
        rows: int64 ``[P, R]`` into ``[B * M * Nq]``.
        columns: int64 ``[P, W]`` into ``[B * M * Nk]``.
        bias: float32 ``[P, 1, 1, R, W]``, 0 or -inf; None where all is visible.
    """

    rows: Tensor
    columns: Tensor
    bias: Tensor | None


def panel_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention under ``plan``, differentiable once.

    Args:
        query: ``[B, Nq, H, D]``.
        key: ``[B, Nk, Hk, D]``, H a multiple of Hk.
        value: ``[B, Nk, Hk, Dv]``.
        plan: for B rows or for one that all share; 1 or Hk mask heads.
        softmax_scale: default ``D ** -0.5``.

    Returns:
        ``[B, Nq, H, Dv]`` in the inputs' dtype, 0 for rows that see nothing, and the log-sum-exp of the
        scaled scores, float32 ``[B, H, Nq]``, -inf for those rows.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _PanelAttention.apply(query, key, value, plan.expanded(query.shape[0]), scale)
    return out, lse.float()


class _PanelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, scale: float) -> Any:
        out, lse = panel_forward(query, key, value, plan, scale)
        if not _finite(out):
            out, lse = panel_forward(query, key, value, plan, scale, strict=True)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out.to(query.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        arguments = (grad_out, grad_lse, *ctx.saved_tensors, ctx.plan, ctx.scale)
        grads = panel_backward(*arguments)
        if not _finite(*grads):
            grads = panel_backward(*arguments, strict=True)
        return *grads, None, None


def panel_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, scale: float, *, strict: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp as :func:`panel_attention`'s, both in the computing dtype, for a plan of B rows.

    Only with ``strict`` do hidden pairs add nothing where a key, a value or their score is not finite.
    """
    key_heads = key.shape[2]
    q, k, v = _flat(query, plan, key_heads), _flat(key, plan, key_heads), _flat(value, plan, key_heads)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = q.new_full(q.shape[:3], float("-inf"))
    for panels in _panels(plan, q.shape[1] * q.shape[2]):
        visible = _visible(panels, q.shape[2]) if strict else None
        scores = _scores(q, k, panels, scale, visible)
        highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
        weights = _exp(scores.sub_(highest))
        total = weights.sum(-1, keepdim=True)
        # A row that sees nothing has weights of 0: 0 / 1 gives its output.
        seen = visible_sum(weights, _taken(v, panels.columns), visible) / total.masked_fill(total == 0, 1.0)
        _put(out, panels.rows, seen)
        _put(lse.unsqueeze(-1), panels.rows, highest + total.log())
    return _unflat(out, plan), _unflat(lse.unsqueeze(-1), plan).squeeze(-1).transpose(1, 2)


def panel_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: MaskPlan,
    scale: float,
    *,
    strict: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in their dtype, from what :func:`panel_forward` made; ``strict`` as
    there, where a query or a gradient is not finite too."""
    key_heads = key.shape[2]
    q, k, v = _flat(query, plan, key_heads), _flat(key, plan, key_heads), _flat(value, plan, key_heads)
    grad = _flat(grad_out, plan, key_heads)
    # dS = P * (dO V^T - delta) with delta = rowsum(dO * O), less what comes through the log-sum-exp.
    delta = (grad_out.to(q.dtype) * out.to(q.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse.to(q.dtype).transpose(1, 2)
    delta = _flat(delta.unsqueeze(-1), plan, key_heads)
    # Scores of -inf less 0 give the weights of rows that see nothing, 0.
    lse = lse.transpose(1, 2).masked_fill(lse.transpose(1, 2) == float("-inf"), 0.0)
    lse = _flat(lse.unsqueeze(-1), plan, key_heads)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for panels in _panels(plan, q.shape[1] * q.shape[2]):
        visible = _visible(panels, q.shape[2]) if strict else None
        seen_by = None if visible is None else visible.transpose(-1, -2)
        weights = _exp(_scores(q, k, panels, scale, visible).sub_(_taken(lse, panels.rows)))
        out_rows = _taken(grad, panels.rows)
        _add(grad_v, panels.columns, visible_sum(weights.transpose(-1, -2), out_rows, seen_by))
        scores = out_rows @ _taken(v, panels.columns).transpose(-1, -2)
        scores = scores.sub_(_taken(delta, panels.rows)).mul_(weights).mul_(scale)
        _put(grad_q, panels.rows, visible_sum(scores, _taken(k, panels.columns), visible))
        _add(grad_k, panels.columns, visible_sum(scores.transpose(-1, -2), _taken(q, panels.rows), seen_by))
    grad_q, grad_k, grad_v = (_unflat(grad, plan).to(query.dtype) for grad in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def _visible(panels: _Panels, groups: int) -> Tensor | None:
    """bool ``[P, 1, groups * R, W]``; None where all is visible."""
    bias = panels.bias
    return None if bias is None else (bias == 0).expand(-1, -1, groups, -1, -1).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, panels: _Panels, scale: float, visible: Tensor | None) -> Tensor:
    """Scaled and masked, ``[P, heads, groups * R, W]``; by ``visible`` if that is given."""
    scores = _taken(q, panels.rows).mul_(scale) @ _taken(k, panels.columns).transpose(-1, -2)
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    elif panels.bias is not None:
        scores.unflatten(2, (-1, panels.rows.shape[1])).add_(panels.bias)
    return scores


def _exp(scores: Tensor) -> Tensor:
    """exp in place, 0 below ``_LOWEST``: MKL takes 5 to 20 times as long where the result underflows."""
    return threshold(scores.clamp_(min=_LOWEST).exp_(), 1.001 * math.exp(_LOWEST), 0.0, inplace=True)


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Panels of equal shape.

    Attributes:
        strip: int64 ``[P]`` into ``[B * M * row strips]``.
        height: rows of each panel, R.
        tiles: int64 ``[P, n]``, column tiles.
        partial: whether the mask must be looked at.
    """

    strip: Tensor
    height: int
    tiles: Tensor
    partial: bool

    @property
    def scores(self) -> int:
        """Of one panel, in one head."""
        return self.height * self.tiles.shape[1] * BLOCK


def _panels(plan: MaskPlan, heads: int) -> Iterable[_Panels]:
    """All panels that see something, as many at a time as have ``_SCORES`` scores in ``heads`` heads."""
    buckets = plan.prepared("panels", lambda: _buckets(plan))
    if sum(len(bucket.strip) * bucket.scores for bucket in buckets) > _KEEP_BELOW:
        return _batches(plan, buckets, heads)
    return plan.prepared(("panels", heads), lambda: list(_batches(plan, buckets, heads)))


def _batches(plan: MaskPlan, buckets: list[_Bucket], heads: int) -> Iterator[_Panels]:
    for bucket in buckets:
        step = max(1, _SCORES // (heads * bucket.scores))
        for begin in range(0, len(bucket.strip), step):
            mask, row, column = _places(plan, bucket, slice(begin, begin + step))
            bias = _bias(plan, mask, row, column) if bucket.partial else None
            column = column.clamp(max=plan.columns - 1)
            yield _Panels(mask * plan.rows + row, mask * plan.columns + column, bias)


def _buckets(plan: MaskPlan) -> list[_Bucket]:
    listed = plan.row_tiles(BLOCK, BLOCK)
    offsets, strips = listed.offsets.long(), listed.strips
    count = offsets.diff()
    strip = torch.arange(len(count), device=count.device)
    height = torch.where(strip % strips == strips - 1, plan.rows - (strips - 1) * BLOCK, BLOCK)
    # A panel needs its mask for a partial tile, and for a last one that is cut off by Nk.
    marked = (listed.entries & 1) > 0
    if plan.columns % BLOCK:
        marked |= listed.entries >> 1 == plan.columns // BLOCK
    partial = torch.zeros_like(count).index_add_(0, strip.repeat_interleave(count), marked.long()) > 0
    kinds, which = torch.stack((count, height, partial.long()), -1).unique(dim=0, return_inverse=True)
    members = which.argsort(stable=True).split(which.bincount(minlength=len(kinds)).tolist())
    return [
        _Bucket(
            strip=chosen,
            height=rows,
            tiles=(listed.entries[offsets[chosen, None] + torch.arange(n, device=chosen.device)] >> 1).long(),
            partial=bool(masked),
        )
        for (n, rows, masked), chosen in zip(kinds.tolist(), members)
        if n
    ]


def _places(plan: MaskPlan, bucket: _Bucket, part: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Of some panels: mask (b, m) ``[P, 1]``, rows ``[P, R]``, columns ``[P, W]``, perhaps beyond Nk."""
    strip, tiles = bucket.strip[part, None], bucket.tiles[part, :, None]
    strips = -(-plan.rows // BLOCK)
    cell = torch.arange(BLOCK, device=strip.device)
    return strip // strips, strip % strips * BLOCK + cell[: bucket.height], (tiles * BLOCK + cell).flatten(1)


def _bias(plan: MaskPlan, mask: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """-inf where rows don't see columns, else 0; float32 ``[P, 1, 1, R, W]``."""
    bounds = plan.intervals.flatten(0, 1)[mask, column.clamp(max=plan.columns - 1)]  # [P, W, K, 2]
    row = row[:, :, None].int()
    hidden = (column >= plan.columns)[:, None].expand(-1, row.shape[1], -1)
    for low, high in zip(*(bound.unbind(-1) for bound in bounds.unsqueeze(1).unbind(-1))):
        hidden = hidden | ((row >= low) & (row < high))
    return torch.zeros(hidden.shape, device=row.device).masked_fill_(hidden, float("-inf"))[:, None, None]


def _flat(tensor: Tensor, plan: MaskPlan, key_heads: int) -> Tensor:
    """``[B, N, H, D]`` as ``[B * M * N, key heads of a mask, groups, D]`` in the computing dtype."""
    split = tensor.unflatten(2, (plan.heads, key_heads // plan.heads, -1)).transpose(1, 2)
    return split.to(torch.promote_types(tensor.dtype, torch.float32)).flatten(0, 2)


def _unflat(tensor: Tensor, plan: MaskPlan) -> Tensor:
    """The inverse of :func:`_flat`, ``[B, N, H, D]``."""
    return tensor.flatten(1, 2).unflatten(0, (plan.batch, plan.heads, -1)).transpose(1, 2).flatten(2, 3)


def _taken(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows ``[P, R]`` of a flat tensor as ``[P, heads, groups * R, D]``, a copy."""
    rows = tensor.index_select(0, index.flatten()).unflatten(0, index.shape)
    return rows.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _put(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    tensor.index_copy_(0, index.flatten(), _rows(tensor, index, values))


def _add(tensor: Tensor, index: Tensor, values: Tensor) -> None:
    tensor.index_add_(0, index.flatten(), _rows(tensor, index, values))


def _rows(tensor: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """The inverse of :func:`_taken`: ``[P * R, heads, groups, D]``."""
    split = values.unflatten(2, (tensor.shape[2], index.shape[1]))
    return split.permute(0, 3, 1, 2, 4).flatten(0, 1)
