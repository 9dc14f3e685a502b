"""Column-interval masks and the plan that attention runs from.

Shape letters: B rows of the batch, M mask heads (1 or the number of key heads), Nq query rows, Nk key
columns, K intervals a column.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BLOCK = 64


@dataclass(eq=False)
class MaskPlan:
    """A mask prepared once and used by every layer, forward and backward.

    Attributes:
        intervals: int32 ``[B, M, Nk, K, 2]``; query rows in ``[start, end)`` do not see the column. Empty
            intervals have ``start == end``.
        rows: number of query rows, Nq.
        tiles: bool ``[B, M, ceil(Nq / 64), ceil(Nk / 64)]``; False where no query of the tile sees any
            key of it. A True tile may still be empty when only the union of several intervals hides it:
            the test is sound, not complete.
    """

    intervals: Tensor
    rows: int
    tiles: Tensor
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_intervals(cls, intervals: Tensor, rows: int) -> MaskPlan:
        """Prepare the general form.

        Args:
            intervals: int32 ``[B, M, Nk, K, 2]`` of masked query rows, clipped to ``[0, rows]``.
            rows: number of query rows.

        Raises:
            ValueError: wrong dtype or shape, or an interval with ``start > end``.
        """
        if intervals.dtype != torch.int32 or intervals.dim() != 5 or intervals.shape[-1] != 2:
            raise ValueError(
                f"intervals must be int32 [B, M, Nk, K, 2], got {intervals.dtype} {tuple(intervals.shape)}"
            )
        intervals = intervals.clamp(0, rows)
        start, end = intervals.unbind(-1)
        if bool((start > end).any()):
            raise ValueError("an interval of masked rows starts after it ends")
        return cls(intervals, rows, _visible_tiles(start, end, rows))

    def dense(self, first_row: int = 0, last_row: int | None = None) -> Tensor:
        """Visibility as bool ``[B, M, rows, Nk]`` for query rows ``[first_row, last_row)``."""
        last_row = self.rows if last_row is None else last_row
        row = torch.arange(first_row, last_row, dtype=torch.int32, device=self.intervals.device)
        start, end = self.intervals.unbind(-1)
        visible = torch.ones(
            (*start.shape[:2], len(row), start.shape[2]), dtype=torch.bool, device=start.device
        )
        for index in range(start.shape[-1]):
            low, high = start[..., None, :, index], end[..., None, :, index]
            visible &= (row[:, None] < low) | (row[:, None] >= high)
        return visible


def _visible_tiles(start: Tensor, end: Tensor, rows: int) -> Tensor:
    """Tiles that some query may see, from the minima and maxima of the bounds in each column block."""
    columns = start.shape[2]
    blocks = -(-columns // BLOCK)
    padding = blocks * BLOCK - columns
    # Padded columns are hidden from all rows, so they never make a tile visible.
    start = torch.nn.functional.pad(start, (0, 0, 0, padding), value=0)
    end = torch.nn.functional.pad(end, (0, 0, 0, padding), value=rows)
    shape = (*start.shape[:2], blocks, BLOCK, start.shape[-1])
    latest_start = start.reshape(shape).amax(-2)[..., None, :, :]
    earliest_end = end.reshape(shape).amin(-2)[..., None, :, :]
    first = torch.arange(0, rows, BLOCK, device=start.device)[:, None, None]
    last = (first + BLOCK).clamp(max=rows)
    hidden = (latest_start <= first) & (earliest_end >= last)
    return ~hidden.any(-1)
