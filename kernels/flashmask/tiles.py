"""Lists of the tiles that some query sees, from the hulls of visible and of masked rows.

In the columns of one tile, piece k of the visible rows (what lies between masked intervals k - 1 and k) has
a least start and a greatest end; tiles outside all these hulls are skipped. Tiles outside the hulls of the
masked intervals are full. These are FlashMask's minima and maxima (Wang et al., arXiv 2410.01359, section
4.1), taken over visible pieces instead of masked ones: so intervals that touch need no merging, and wholly
masked columns and empty intervals decide nothing. The test is sound; it is incomplete only where the pieces
of a hull leave a gap. A column tile then has a few runs of row tiles: time and memory are O(N + visible
tiles).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 1 << 19  # tiles sorted at once, which bounds temporary memory


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


@dataclass(frozen=True, eq=False)
class TileRuns:
    """Visible tiles as runs of row tiles; mask after mask, column tile after column tile, ascending.

    Attributes:
        strip: int64 ``[runs]``; mask * column tiles + column tile.
        first: int64 ``[runs]``; the first row tile.
        length: int64 ``[runs]``; at least 1.
        partial: int64 ``[runs]``, 0 or 1; of all tiles in the run.
        masks, row_strips, column_strips: B * M, ceil(Nq / row block), ceil(Nk / column block).
    """

    strip: Tensor
    first: Tensor
    length: Tensor
    partial: Tensor
    masks: int
    row_strips: int
    column_strips: int


def tile_runs(intervals: Tensor, rows: int, row_block: int, column_block: int) -> TileRuns:
    """Runs of visible tiles under checked intervals, int32 ``[B, M, Nk, K, 2]``."""
    columns = intervals.shape[2]
    strips = -(-columns // column_block)
    padding = strips * column_block - columns

    def hull(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """First and one past the last row tile that any non-empty ``[start, end)`` of a strip touches."""
        empty = start >= end
        low = F.pad(start.masked_fill(empty, rows), (0, padding), value=rows).unflatten(1, (strips, -1))
        high = F.pad(end.masked_fill(empty, 0), (0, padding), value=0).unflatten(1, (strips, -1))
        low, high = low.amin(2), high.amax(2)
        first = low // row_block
        return first, torch.maximum(first, (high + row_block - 1) // row_block)

    bounds = intervals.flatten(0, 1).permute(2, 3, 0, 1).contiguous()  # [K, 2, B * M, Nk]
    seen, masked = [], []
    reached = torch.zeros_like(bounds[0, 0])
    for start, end in bounds:
        live = start < end
        masked.append(hull(start, end))
        seen.append(hull(reached, torch.where(live, start, reached)))
        reached = torch.where(live, end, reached)
    seen.append(hull(reached, torch.full_like(reached, rows)))
    cuts = torch.stack([cut for pair in (*seen, *masked) for cut in pair], -1).sort(-1).values
    first, length = cuts[..., :-1], cuts.diff(dim=-1)

    def inside(hulls: list[tuple[Tensor, Tensor]]) -> Tensor:
        found = torch.zeros_like(first, dtype=torch.bool)
        for low, high in hulls:
            found |= (low[..., None] <= first) & (first < high[..., None])
        return found

    mask, strip, run = (inside(seen) & (length > 0)).nonzero(as_tuple=True)
    return TileRuns(
        strip=mask * strips + strip,
        first=first[mask, strip, run].long(),
        length=length[mask, strip, run].long(),
        partial=inside(masked)[mask, strip, run].long(),
        masks=bounds.shape[2],
        row_strips=-(-rows // row_block),
        column_strips=strips,
    )


def column_list(runs: TileRuns) -> TileList:
    """Per strip of key columns, the visible row tiles."""
    offsets = _offsets(
        torch.zeros(runs.masks * runs.column_strips, dtype=torch.int64, device=runs.strip.device).index_add_(
            0, runs.strip, runs.length
        )
    )
    entries = _expanded(2 * runs.first + runs.partial, runs.length, 2)
    return TileList(offsets, entries, runs.column_strips)


def row_list(runs: TileRuns) -> TileList:
    """Per strip of query rows, the visible column tiles: the runs transposed, some strips at a time."""
    columns, total = runs.column_strips, runs.masks * runs.row_strips
    mask = runs.strip // columns
    column = runs.strip - mask * columns
    first = mask * runs.row_strips + runs.first
    last = first + runs.length
    changes = torch.zeros(total + 1, dtype=torch.int64, device=first.device)
    changes.index_add_(0, first, torch.ones_like(first)).index_add_(0, last, -torch.ones_like(last))
    offsets = _offsets(changes[:-1].cumsum(0))
    counts: list[int] = offsets.tolist()
    parts = []
    begin = 0
    while begin < total:
        end = max(begin + 1, bisect_right(counts, counts[begin] + _CHUNK) - 1)
        end = min(end, begin + max(1, (1 << 30) // columns), total)  # keys fit int32
        low, high = first.clamp(min=begin), last.clamp(max=end)
        here = (low < high).nonzero().squeeze(1)
        low, high = low[here], high[here]
        # (strip, column tile, partial) as one number, sorted; in a run only the strip moves on.
        key = ((low - begin) * columns + column[here]) * 2 + runs.partial[here]
        parts.append(_expanded(key, high - low, 2 * columns).sort().values.remainder_(2 * columns))
        begin = end
    return TileList(offsets, torch.cat(parts), runs.row_strips)


def _offsets(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0)).int()


def _expanded(first: Tensor, length: Tensor, step: int) -> Tensor:
    """int32: ``first, first + step, ...`` (``length`` of them) of every run in turn.

    Steps are summed up in place, since ``repeat_interleave`` would need five times the memory.
    """
    end = length.cumsum(0)
    out = torch.full((int(end[-1]) if len(end) else 0,), step, dtype=torch.int32, device=first.device)
    before = F.pad((first + (length - 1) * step)[:-1], (1, 0))
    out[end - length] = (first - before).int()
    return out.cumsum_(0)
