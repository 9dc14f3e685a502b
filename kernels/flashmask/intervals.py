"""Masked row intervals of key columns: checks and the normal form.

A mask is int32 ``[B, M, Nk, K, 2]``: per row of the batch, mask head and key column, K intervals
``[start, end)`` of query rows that do not see the column. M is 1 or the number of key heads. An interval with
``start == end`` is empty and may lie anywhere; the others are sorted and disjoint (they may touch).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ernie5.kernels.checks import require_tensor

MAX_INTERVALS = 3


def checked_intervals(intervals: Tensor, rows: int) -> Tensor:
    """The intervals clipped to ``[0, rows]``, without the slots that are empty in every column.

    Clipping is exact, as there are no other rows. Always a new, contiguous tensor. Waits for the device once.

    Raises:
        ValueError: not int32, not ``[B, M, Nk, K, 2]`` with 1 to 3 intervals, an interval that starts after
            it ends, or intervals of a column that overlap or come out of order; rows that int32 can't count.
    """
    require_tensor(intervals, "intervals")
    shape = tuple(intervals.shape)
    if intervals.dtype != torch.int32 or intervals.dim() != 5 or shape[-1] != 2:
        raise ValueError(f"intervals must be int32 [B, M, Nk, K, 2], got {intervals.dtype} {list(shape)}")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows > torch.iinfo(torch.int32).max:
        raise ValueError(f"rows must be a whole number below 2**31, got {rows!r}")
    if rows < 1 or 0 in shape:
        raise ValueError(f"a mask needs at least one row and one column, got {rows} rows and {list(shape)}")
    if shape[3] > MAX_INTERVALS:
        raise ValueError(
            f"a column takes at most {MAX_INTERVALS} intervals of masked rows, got {shape[3]}; merge those "
            "that touch or overlap with normalised_intervals"
        )
    start, end = intervals.unbind(-1)
    bad = (start > end).any(-1)
    reached = torch.full_like(start[..., 0], torch.iinfo(torch.int32).min)
    for low, high in zip(start.unbind(-1), end.unbind(-1)):
        live = low < high
        bad |= live & (low < reached)
        reached = torch.where(live, high, reached)
    clipped = intervals.clamp(0, rows).contiguous()
    used = (clipped[..., 0] < clipped[..., 1]).flatten(0, 2).any(0)
    invalid, *slots = torch.cat((bad.any()[None], used)).tolist()
    if invalid:
        batch, head, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"masked intervals {intervals[batch, head, column].tolist()} of column {column} (batch {batch}, "
            f"head {head}) must each start before they end and be sorted and disjoint; sort and merge them "
            "with normalised_intervals"
        )
    if all(slots):
        return clipped
    kept = [index for index, slot in enumerate(slots) if slot] or [0]
    return clipped[..., kept, :].contiguous()


def normalised_intervals(intervals: Tensor, rows: int) -> Tensor:
    """The same masked rows as sorted, disjoint intervals that do not touch, in as few slots as possible.

    Args:
        intervals: int32 ``[B, M, Nk, K, 2]``, any K; overlapping, unsorted or reversed (then empty).
        rows: number of query rows; intervals are clipped to ``[0, rows]``.

    Returns:
        int32 ``[B, M, Nk, K', 2]`` with ``1 <= K' <= K``; unused slots are ``[rows, rows)``, at the end.
    """
    start, end = intervals.clamp(0, rows).unbind(-1)
    empty = start >= end
    start, order = start.masked_fill(empty, rows).sort(-1)
    end = end.masked_fill(empty, rows).gather(-1, order)
    reached = end.cummax(-1).values
    # An interval opens a group where it starts beyond all that came before; groups become slots in order.
    opens = start[..., 1:] > reached[..., :-1]
    group = torch.cat((torch.zeros_like(start[..., :1], dtype=torch.int64), opens.cumsum(-1)), -1)
    low = torch.full_like(start, rows).scatter_reduce_(-1, group, start, "amin")
    high = torch.zeros_like(end).scatter_reduce_(-1, group, end, "amax")
    high = torch.where(low < high, high, rows)
    slots = max(1, int((low < high).sum(-1).max()))
    return torch.stack((low[..., :slots], high[..., :slots]), -1)
