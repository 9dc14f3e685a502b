"""Paddle's ``startend_row_indices`` to masked intervals and back.

The form (PaddlePaddle's ``flashmask_attention``; Wang et al., arXiv 2410.01359, section 4) holds int32
``[B, M, Nk, C]``. Per key column j the masked query rows are

=======  ===  ==========================================
causal   C    masked rows
=======  ===  ==========================================
yes      --   those before the diagonal
yes      1    those, and rows >= s0
yes      2    those, and s0 <= row < s1
no       --   none
no       2    rows >= s0, and rows < s1
no       4    s0 <= row < s1, and s2 <= row < s3
=======  ===  ==========================================

The diagonal of column j is row ``j - (Nk - Nq)``: aligned at the bottom right. Bounds outside ``[0, Nq]``
mean what they say and are clipped; intervals may overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ernie5.kernels.checks import require_tensor
from ernie5.kernels.flashmask.intervals import normalised_intervals


def intervals_from_startend(indices: Tensor | None, rows: int, key: Tensor, causal: bool) -> Tensor:
    """Masked row intervals ``[B, M, Nk, K, 2]`` of Paddle's form, sorted and disjoint.

    Args:
        indices: int32 ``[B, 1 or Hk, Nk, 1 | 2 | 4]``, or None for full or causal attention.
        rows: query rows, Nq.
        key: ``[B, Nk, Hk, D]``; only its shape and device are used.
        causal: hide later keys too.

    Raises:
        ValueError: wrong dtype or device, a shape that does not fit ``key``, an undefined number of
            bounds.
    """
    batch, columns, heads = key.shape[:3]
    zero = torch.zeros(1, 1, columns, dtype=torch.int32, device=key.device)
    full = torch.full_like(zero, rows)
    diagonal = _diagonal(rows, columns, key.device) if causal else zero[0, 0]
    if indices is None:
        return torch.stack((zero, diagonal.expand_as(zero)), -1).unsqueeze(-2).repeat(batch, 1, 1, 1, 1)
    require_tensor(indices, "startend_row_indices")
    if indices.dtype != torch.int32:
        raise ValueError(f"startend_row_indices must be int32, got {indices.dtype}")
    if indices.device != key.device:
        raise ValueError(f"startend_row_indices are on {indices.device}, the key on {key.device}")
    if indices.dim() != 4 or indices.shape[0] != batch or indices.shape[2] != columns:
        raise ValueError(
            f"startend_row_indices must be [{batch}, 1 or {heads}, {columns}, bounds] for keys of shape "
            f"{list(key.shape)}, got {list(indices.shape)}"
        )
    if indices.shape[1] not in (1, heads):
        raise ValueError(f"startend_row_indices have {indices.shape[1]} heads; they take 1 or {heads}")
    bounds = indices.clamp(0, rows).unbind(-1)
    # Rows before an earlier interval's end are masked anyway: starting there makes intervals disjoint.
    match (causal, len(bounds)):
        case (True, 1):
            pairs = [(zero, diagonal), (torch.maximum(bounds[0], diagonal), full)]
        case (True, 2):
            low = torch.maximum(bounds[0], diagonal)
            pairs = [(zero, diagonal), (low, torch.maximum(bounds[1], low))]
        case (False, 2):
            pairs = [(zero, bounds[1]), (torch.maximum(bounds[0], bounds[1]), full)]
        case (False, 4):
            return normalised_intervals(indices.unflatten(-1, (2, 2)), rows)
        case _:
            raise ValueError(
                f"{len(bounds)} bounds with causal={causal} are not defined; causal takes 1 or 2, "
                "otherwise 2 or 4"
            )
    shape = bounds[0].shape
    return torch.stack([torch.stack((s.expand(shape), e.expand(shape)), -1) for s, e in pairs], -2)


def startend_from_intervals(intervals: Tensor, rows: int) -> tuple[Tensor | None, bool]:
    """Paddle's form of a mask, with as few bounds as possible: ``(startend_row_indices, causal)``.

    Args:
        intervals: int32 ``[B, M, Nk, K, 2]``.
        rows: query rows, Nq.

    Returns:
        int32 ``[B, M, Nk, 1 | 2 | 4]`` and whether causal; None for full or plainly causal masks.

    Raises:
        ValueError: no form of Paddle's holds the mask; names the first column that 4 bounds can't hold.
    """
    wanted = normalised_intervals(intervals, rows)
    batch, heads, columns = wanted.shape[:3]
    key = torch.empty(batch, columns, heads, 0, device=wanted.device)
    start, end = wanted.unbind(-1)
    diagonal = _diagonal(rows, columns, wanted.device)
    # The masked rows at the top and at the bottom; a wholly masked column has both.
    top = torch.where(start[..., 0] == 0, end[..., 0], 0)
    bottom = torch.where(end == rows, start, rows).amin(-1)
    # What the causal triangle leaves of the first interval, and the next one.
    rest = torch.maximum(start[..., 0], diagonal)
    below = rest < end[..., 0]
    second_start = start[..., 1] if start.shape[-1] > 1 else torch.full_like(rest, rows)
    second_end = end[..., 1] if start.shape[-1] > 1 else torch.full_like(rest, rows)
    beside = (torch.where(below, rest, second_start), torch.where(below, end[..., 0], second_end))
    forms: list[tuple[bool, tuple[Tensor, ...]]] = [
        (False, ()),
        (True, ()),
        (True, (bottom,)),
        (False, (bottom, top)),
        (True, beside),
        (False, (second_start, second_end, start[..., 0], end[..., 0])),
    ]
    for causal, bounds in forms:
        indices = torch.stack(bounds, -1) if bounds else None
        found = normalised_intervals(intervals_from_startend(indices, rows, key, causal), rows)
        if torch.equal(found.expand(batch, -1, -1, -1, -1), wanted):
            return indices, causal
    column = (start < end).sum(-1)
    b, h, j = (column == column.max()).nonzero()[0].tolist()
    raise ValueError(
        f"column {j} (batch {b}, head {h}) masks rows {wanted[b, h, j].tolist()}; startend_row_indices "
        "hold two intervals a column, one of them the causal triangle where causal; pass the mask as a plan"
    )


def _diagonal(rows: int, columns: int, device: torch.device) -> Tensor:
    """First row that sees each column causally, int32 ``[Nk]``."""
    return (torch.arange(columns, dtype=torch.int32, device=device) - (columns - rows)).clamp(0, rows)
