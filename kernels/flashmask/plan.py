"""Column-interval masks and the plan that attention runs from.

Shape letters: B rows of the batch, M mask heads (1 or the number of key heads), Nq query rows, Nk key
columns, K intervals a column.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ernie5.kernels.checks import require_tensor
from ernie5.kernels.flashmask.cache import ByteCache
from ernie5.kernels.flashmask.intervals import checked_intervals
from ernie5.kernels.flashmask.tiles import TileList, TileRuns, column_list, row_list, tile_runs

__all__ = ["BLOCK", "MaskPlan", "TileList"]

BLOCK = 64
_T = TypeVar("_T")


@dataclass(eq=False)
class MaskPlan:
    """A mask prepared once and used by every layer, forward and backward.

    Attributes:
        intervals: int32 ``[B, M, Nk, K, 2]``, contiguous; query rows in ``[start, end)`` do not see the
            column. Empty intervals have ``start == end``; the others are sorted and disjoint.
        rows: number of query rows, Nq.

    Made by :meth:`from_intervals` or :meth:`cached`, which check; neither attribute may change afterwards.
    """

    intervals: Tensor
    rows: int
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    _on_growth: Callable[[], None] | None = field(default=None, repr=False)

    @classmethod
    def from_intervals(cls, intervals: Tensor, rows: int) -> MaskPlan:
        """Prepare the general form.

        Args:
            intervals: int32 ``[B, M, Nk, K, 2]`` of masked query rows, K of 1 to 3, sorted and disjoint in
                each column (empty ones anywhere). They are clipped to ``[0, rows]`` and copied; slots that
                are empty in every column are left out.
            rows: number of query rows.

        Raises:
            ValueError: wrong dtype or shape, or a column whose intervals are reversed, unsorted or overlap;
                see :func:`ernie5.kernels.flashmask.intervals.normalised_intervals`.
        """
        if torch.is_inference_mode_enabled():
            # A plan outlives an evaluation and may be used by training.
            with torch.inference_mode(False):
                return cls(checked_intervals(intervals, rows).clone(), rows)
        return cls(checked_intervals(intervals, rows), rows)

    @classmethod
    def cached(cls, intervals: Tensor, rows: int, device: torch.device | str | None = None) -> MaskPlan:
        """:meth:`from_intervals`, or the plan last made of equal intervals, with all that it has prepared.

        Plans are found by a digest of the bytes, so intervals made anew for every step hit. From a GPU they
        are copied to the host for it (24 bytes a column); where they are on the host anyway, give those and
        ``device``, where the plan is to lie (default: where the intervals lie).
        """
        require_tensor(intervals, "intervals")
        place = torch.device(device or intervals.device)
        host = intervals.detach().cpu().contiguous()
        digest = hashlib.blake2b(host.view(-1).view(torch.uint8).numpy().data, digest_size=16).digest()
        key = (digest, tuple(host.shape), host.dtype, rows, place)

        def make() -> MaskPlan:
            plan = cls.from_intervals(intervals.to(place), rows)
            plan._on_growth = functools.partial(_cache.measure, key)
            return plan

        return _cache.get(key, make)

    @classmethod
    def of(cls, intervals: Tensor, rows: int) -> MaskPlan:
        """The plan whose ``intervals`` these are: the living one if it is that very tensor, else by content.

        For code that can be handed tensors only, such as a ``torch.library`` operator.
        """
        return cls.living(intervals, rows) or cls.cached(intervals, rows)

    @classmethod
    def living(cls, intervals: Tensor, rows: int) -> MaskPlan | None:
        """The plan whose ``intervals`` are this very tensor, if anybody still holds it."""
        reference = _living.get(intervals)
        plan = reference() if reference is not None else None
        return plan if plan is not None and plan.rows == rows else None

    def __post_init__(self) -> None:
        _living[self.intervals] = weakref.ref(self)

    @property
    def batch(self) -> int:
        return self.intervals.shape[0]

    @property
    def heads(self) -> int:
        """Mask heads, M."""
        return self.intervals.shape[1]

    @property
    def columns(self) -> int:
        return self.intervals.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the intervals and of everything prepared from them so far."""
        return _nbytes(self)

    def expanded(self, batch: int) -> MaskPlan:
        """This plan of one batch row for ``batch`` equal rows."""
        if self.batch == batch:
            return self
        if self.batch != 1:
            raise ValueError(f"a plan of {self.batch} batch rows can't serve {batch}")
        repeated = self.intervals.expand(batch, -1, -1, -1, -1)
        return self.prepared(
            ("expanded", batch),
            lambda: MaskPlan(repeated.contiguous(), self.rows, _on_growth=self._on_growth),
        )

    def row_tiles(self, row_block: int = BLOCK, column_block: int = BLOCK) -> TileList:
        """Per strip of ``row_block`` query rows, the visible tiles of ``column_block`` key columns."""
        return self.prepared(
            ("row tiles", row_block, column_block), lambda: row_list(self._runs(row_block, column_block))
        )

    def column_tiles(self, row_block: int = BLOCK, column_block: int = BLOCK) -> TileList:
        """Per strip of ``column_block`` key columns, the visible tiles of ``row_block`` query rows."""
        return self.prepared(
            ("column tiles", row_block, column_block),
            lambda: column_list(self._runs(row_block, column_block)),
        )

    def dense(self, first_row: int = 0, last_row: int | None = None) -> Tensor:
        """Visibility as bool ``[B, M, rows, Nk]`` for query rows ``[first_row, last_row)``."""
        last_row = self.rows if last_row is None else last_row
        row = torch.arange(first_row, last_row, dtype=torch.int32, device=self.intervals.device)[:, None]
        visible = torch.ones((), dtype=torch.bool, device=row.device)
        for pair in self.intervals.unsqueeze(2).unbind(-2):  # [B, M, 1, Nk, 2] for each slot
            low, high = pair.unbind(-1)
            visible = visible & ((row < low) | (row >= high))
        return visible

    def prepared(self, key: Any, build: Callable[[], _T]) -> _T:
        """What ``build`` makes from this plan, made once; backends keep their own preparations here."""
        if key not in self._cache:
            # One thread builds, the others take what it built: kernels hold addresses of it.
            with _building:
                if key not in self._cache:
                    self._cache[key] = build()
                    if self._on_growth is not None:
                        self._on_growth()
        return self._cache[key]

    def _runs(self, row_block: int, column_block: int) -> TileRuns:
        return self.prepared(
            ("runs", row_block, column_block),
            lambda: tile_runs(self.intervals, self.rows, row_block, column_block),
        )


_building = threading.RLock()
CACHE_BYTES = 256 << 20
_cache: ByteCache[MaskPlan] = ByteCache(CACHE_BYTES)
# Weak on both sides, as a plan holds its tensor.
_living = WeakIdKeyDictionary()


def _nbytes(root: Any) -> int:
    """Bytes of all tensors in lists, tuples and objects with fields; each object once."""
    total, seen, waiting = 0, set[int](), [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            total += value.nbytes
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (tuple, list)):
            waiting += value
        elif hasattr(value, "__dict__"):
            waiting += vars(value).values()
    return total
