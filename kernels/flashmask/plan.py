"""Column-interval masks and the plan that attention runs from.

Shape letters: B rows of the batch, M mask heads (1 or the number of key heads), Nq query rows, Nk key
columns, K intervals a column.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
_CHUNK = 1 << 20  # tiles tested at once, so that the test's memory does not grow with N^2


@dataclass(frozen=True, eq=False)
class TileList:
    """The tiles that some query sees, as compressed rows: strip after strip, ascending inside a strip.

    Attributes:
        offsets: int32 ``[B * M * strips + 1]``; entries of strip s of mask (b, m) are
            ``entries[offsets[i]:offsets[i + 1]]`` with ``i = (b * M + m) * strips + s``.
        entries: int32 ``[visible]``; ``2 * tile + partial``. A partial tile needs the test of each element,
            another one (full) is seen by all its queries. Cells beyond the last row or column belong to no
            interval: the last tile of a strip may be full and still be cut off by Nq or Nk.
        strips: row tiles of :meth:`MaskPlan.row_tiles`, column tiles of :meth:`MaskPlan.column_tiles`.
    """

    offsets: Tensor
    entries: Tensor
    strips: int


@dataclass(eq=False)
class MaskPlan:
    """A mask prepared once and used by every layer, forward and backward.

    Attributes:
        intervals: int32 ``[B, M, Nk, K, 2]``; query rows in ``[start, end)`` do not see the column. Empty
            intervals have ``start == end``.
        rows: number of query rows, Nq.
    """

    intervals: Tensor
    rows: int
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def columns(self) -> int:
        return self.intervals.shape[2]

    @property
    def heads(self) -> int:
        """Mask heads, M."""
        return self.intervals.shape[1]

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
        if bool((intervals[..., 0] > intervals[..., 1]).any()):
            raise ValueError("an interval of masked rows starts after it ends")
        return cls(intervals, rows)

    def row_tiles(self, row_block: int = BLOCK, column_block: int = BLOCK) -> TileList:
        """Per strip of ``row_block`` query rows, the visible tiles of ``column_block`` key columns."""
        return self._tiles(row_block, column_block, by_column=False)

    def column_tiles(self, row_block: int = BLOCK, column_block: int = BLOCK) -> TileList:
        """Per strip of ``column_block`` key columns, the visible tiles of ``row_block`` query rows."""
        return self._tiles(row_block, column_block, by_column=True)

    @property
    def tiles(self) -> Tensor:
        """bool ``[B, M, ceil(Nq / 64), ceil(Nk / 64)]``: False where no query of the tile sees any key."""
        if "tiles" not in self._cache:
            kinds = [kind for _, kind in self._classify(BLOCK, BLOCK, by_column=False)]
            shape = (len(self.intervals), self.heads, -1, -(-self.columns // BLOCK))
            self._cache["tiles"] = torch.cat(kinds).reshape(shape) > 0
        return self._cache["tiles"]

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

    def _tiles(self, row_block: int, column_block: int, by_column: bool) -> TileList:
        key = ("tiles", row_block, column_block, by_column)
        if key not in self._cache:
            counts, entries, strips = [], [], 0
            for strips, kind in self._classify(row_block, column_block, by_column):
                visible = kind > 0
                counts.append(visible.sum(-1))
                tile = visible.nonzero()[:, 1]
                entries.append(2 * tile.int() + (kind[visible] == 1))
            joined = torch.cat([torch.zeros(1, dtype=torch.int64, device=counts[0].device), *counts])
            self._cache[key] = TileList(joined.cumsum(0).int(), torch.cat(entries).int(), strips)
        return self._cache[key]

    def _classify(self, row_block: int, column_block: int, by_column: bool):  # type: ignore[no-untyped-def]
        """Chunks of (strips of one mask, int8 ``[strips, tiles]``: 0 hidden, 1 partial, 2 full).

        From the minima and maxima of the bounds in each column block (arXiv 2410.01359, section 4.1). The
        test is sound, not complete: a tile hidden only by the union of several intervals stays partial.
        """
        start, end = self.intervals.flatten(0, 1).unbind(-1)
        blocks = -(-self.columns // column_block)
        padding = blocks * column_block - self.columns

        def extreme(bound: Tensor, value: int, largest: bool) -> Tensor:
            # Padded columns copy the neutral value, so that they decide nothing.
            padded = F.pad(bound, (0, 0, 0, padding), value=value)
            padded = padded.view(len(bound), blocks, column_block, -1)
            return padded.amax(2) if largest else padded.amin(2)

        # An empty interval touches no row, wherever it lies.
        empty = start >= end
        latest_start, earliest_end = extreme(start, 0, True), extreme(end, self.rows, False)
        first_masked = extreme(start.masked_fill(empty, self.rows), self.rows, False)
        last_masked = extreme(end.masked_fill(empty, 0), 0, True)
        first = torch.arange(0, self.rows, row_block, dtype=torch.int32, device=start.device)
        last = (first + row_block).clamp(max=self.rows)
        axes = (len(first), blocks)
        strips, tiles = axes[::-1] if by_column else axes
        step = max(1, _CHUNK // tiles)
        for mask in range(len(start)):
            for begin in range(0, strips, step):
                chosen = slice(begin, begin + step)
                low, high = (first[:, None], last[:, None]) if not by_column else (first, last)
                if by_column:
                    bounds = [
                        t[mask, chosen, None] for t in (latest_start, earliest_end, first_masked, last_masked)
                    ]
                    low, high = first[None, :, None], last[None, :, None]
                else:
                    bounds = [t[mask, None] for t in (latest_start, earliest_end, first_masked, last_masked)]
                    low, high = first[chosen, None, None], last[chosen, None, None]
                hidden = ((bounds[0] <= low) & (bounds[1] >= high)).any(-1)
                touched = ((bounds[2] < high) & (bounds[3] > low)).any(-1)
                yield strips, torch.where(hidden, 0, torch.where(touched, 1, 2)).to(torch.int8)
