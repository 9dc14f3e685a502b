"""Mask plans: the checks at their door, their tile lists against every cell, and their cache."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie5.kernels.flashmask import MaskPlan, masks
from ernie5.kernels.flashmask import plan as plan_module
from ernie5.kernels.flashmask.cache import ByteCache
from ernie5.kernels.flashmask.intervals import normalised_intervals
from tests.kernels.flashmask_cases import MASKS, dense_visibility, mask_case


def listed_tiles(plan: MaskPlan, row_block: int, column_block: int) -> dict[tuple[int, int, int], bool]:
    """(mask, row tile, column tile) to partial, from the row lists; the column lists must say the same."""
    found = []
    for tiles, strips, by_row in (
        (plan.row_tiles(row_block, column_block), -(-plan.rows // row_block), True),
        (plan.column_tiles(row_block, column_block), -(-plan.columns // column_block), False),
    ):
        assert tiles.strips == strips
        assert tiles.offsets.dtype == tiles.entries.dtype == torch.int32
        offsets, entries = tiles.offsets.tolist(), tiles.entries.tolist()
        assert len(offsets) == plan.batch * plan.heads * strips + 1
        assert offsets[0] == 0 and offsets[-1] == len(entries)
        kinds = {}
        for index in range(len(offsets) - 1):
            strip = entries[offsets[index] : offsets[index + 1]]
            assert strip == sorted(strip)
            for entry in strip:
                mask, place = divmod(index, strips)
                row, column = (place, entry >> 1) if by_row else (entry >> 1, place)
                kinds[mask, row, column] = bool(entry & 1)
        assert len(kinds) == len(entries)
        found.append(kinds)
    assert found[0] == found[1]
    return found[0]


def unsound_or_idle(plan: MaskPlan, row_block: int, column_block: int) -> tuple[int, int]:
    """Checks that no tile with a visible cell is left out and no full tile has a masked one; returns how
    many listed tiles are all masked, and how many partial ones all visible."""
    tiles = listed_tiles(plan, row_block, column_block)
    dense = plan.dense().flatten(0, 1)
    idle = timid = 0
    for mask in range(dense.shape[0]):
        for row, strip in enumerate(dense[mask].split(row_block)):
            for column, cells in enumerate(strip.split(column_block, dim=1)):
                partial = tiles.get((mask, row, column))
                if partial is None:
                    assert not cells.any(), "a visible cell lies in a skipped tile"
                elif not partial:
                    assert cells.all(), "a masked cell lies in a full tile"
                else:
                    idle += not cells.any()
                    timid += bool(cells.all())
    return idle, timid


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rows,columns", [(1, 1), (300, 300), (257, 400), (400, 257), (1, 200), (31, 127)])
def test_tile_lists_are_exact_on_real_masks(name, rows, columns):
    plan = MaskPlan.from_intervals(mask_case(name, rows, columns, 2), rows)
    for blocks in ((32, 64), (64, 32), (128, 128)):
        assert unsound_or_idle(plan, *blocks) == (0, 0)


@st.composite
def interval_masks(draw):
    """Any checked intervals at all, with empty ones and several masks: (intervals, rows)."""
    rows, columns, slots = draw(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    slope = draw(st.sampled_from([0, 1]))  # of columns that move on with the rows, or of noise
    shape = (2, 2, 1 if slope else columns, 2 * slots)
    bounds = torch.randint(-5, rows + 6, shape, generator=generator, dtype=torch.int32).sort(-1).values
    bounds = bounds + slope * torch.arange(columns, dtype=torch.int32)[:, None]
    intervals = bounds.unflatten(-1, (slots, 2)).clone()
    empty = torch.rand(intervals.shape[:-1], generator=generator) < 0.2
    intervals[..., 1] = torch.where(empty, intervals[..., 0], intervals[..., 1])
    return intervals, rows


@given(interval_masks(), st.sampled_from([(8, 8), (16, 4), (4, 16), (64, 64)]))
@settings(max_examples=60, deadline=None)
def test_tile_lists_are_sound_on_any_mask(mask, blocks):
    plan = MaskPlan.from_intervals(*mask)
    assert torch.equal(plan.dense(), dense_visibility(*mask))
    unsound_or_idle(plan, *blocks)


@given(interval_masks(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_normalised_intervals_mask_the_same_rows(mask, random):
    intervals, rows = mask
    slots = [random.randrange(intervals.shape[3]) for _ in range(5)]
    intervals = intervals[:, :, :, slots].clone()
    intervals[:, :, :, 0] += random.randrange(-9, 9)  # overlaps, in any order
    intervals[:, :, :, 1] = intervals[:, :, :, 1].flip(-1)  # reversed ones are empty
    found = normalised_intervals(intervals, rows)
    assert torch.equal(dense_visibility(found, rows), dense_visibility(intervals, rows))
    start, end = found.unbind(-1)
    assert ((start >= 0) & (start <= end) & (end <= rows)).all()
    live = start[..., 1:] < end[..., 1:]
    assert (start[..., 1:] > end[..., :-1])[live].all()  # sorted, and not even touching
    assert (start < end)[..., 1:].flatten(0, 2).any(0).all()  # no slot in vain


def test_bounds_beyond_the_rows_are_clipped_and_idle_slots_left_out():
    intervals = torch.tensor([[[-7, 0], [2, 3], [50, 60]], [[0, 0], [9, 99], [99, 120]]], dtype=torch.int32)
    plan = MaskPlan.from_intervals(intervals[None, None], 10)
    assert plan.intervals.tolist() == [[[[[2, 3]], [[9, 10]]]]]
    assert MaskPlan.from_intervals(masks.full(5, 4), 5).intervals.shape == (1, 1, 4, 1, 2)


def test_a_plan_does_not_change_with_the_tensor_it_came_from():
    intervals = masks.causal(8, 8)
    plan = MaskPlan.from_intervals(intervals, 8)
    intervals.zero_()
    assert plan.dense().tril().equal(plan.dense())


@pytest.mark.parametrize(
    "column,message",
    [
        ([[5, 3], [6, 7]], r"\[\[5, 3\], \[6, 7\]\] of column 2 \(batch 1, head 0\)"),
        ([[4, 7], [6, 8]], r"\[\[4, 7\], \[6, 8\]\] of column 2"),
        ([[6, 8], [1, 2]], "sorted and disjoint"),
    ],
)
def test_wrong_intervals_are_refused_by_name(column, message):
    intervals = torch.zeros(2, 1, 4, 2, 2, dtype=torch.int32)
    intervals[1, 0, 2] = torch.tensor(column)
    with pytest.raises(ValueError, match=message):
        MaskPlan.from_intervals(intervals, 8)


@pytest.mark.parametrize(
    "intervals,rows,message",
    [
        (torch.zeros(1, 1, 4, 1, 2), 4, "int32.*float32"),
        (torch.zeros(1, 1, 4, 1, 2, dtype=torch.int64), 4, "int32.*int64"),
        (torch.zeros(1, 4, 1, 2, dtype=torch.int32), 4, r"\[1, 4, 1, 2\]"),
        (torch.zeros(1, 1, 4, 1, 3, dtype=torch.int32), 4, r"\[1, 1, 4, 1, 3\]"),
        (torch.zeros(1, 1, 4, 4, 2, dtype=torch.int32), 4, "at most 3"),
        (torch.zeros(1, 1, 4, 0, 2, dtype=torch.int32), 4, "at least one"),
        (torch.zeros(1, 1, 0, 1, 2, dtype=torch.int32), 4, "at least one"),
        (torch.zeros(1, 1, 4, 1, 2, dtype=torch.int32), 0, "at least one row"),
        (torch.zeros(1, 1, 4, 1, 2, dtype=torch.int32), 4.0, r"whole number below 2\*\*31, got 4.0"),
        (torch.zeros(1, 1, 4, 1, 2, dtype=torch.int32), 2**31, "got 2147483648"),
        ([[[[[0, 0]]]]], 4, "must be a tensor, got list"),
    ],
)
def test_wrong_shapes_are_refused(intervals, rows, message):
    for door in (MaskPlan.from_intervals, MaskPlan.cached):
        with pytest.raises(ValueError, match=message):
            door(intervals, rows)


def test_equal_content_gives_the_same_plan():
    plan = MaskPlan.cached(masks.causal(40, 40), 40)
    tiles = plan.row_tiles()
    again = MaskPlan.cached(masks.causal(40, 40), 40)
    assert again is plan and again.row_tiles() is tiles
    assert MaskPlan.cached(masks.causal(40, 40), 39) is not plan
    assert MaskPlan.cached(masks.sliding_window(40, 40, 3), 40) is not plan
    # Same bytes in another shape.
    assert MaskPlan.cached(masks.causal(40, 40).view(2, 1, 20, 1, 2), 40) is not plan


def test_an_operator_finds_the_plan_of_its_tensor():
    plan = MaskPlan.from_intervals(masks.causal(40, 40), 40)
    assert MaskPlan.of(plan.intervals, 40) is plan
    copy = plan.intervals.clone()
    other = MaskPlan.of(copy, 40)
    assert other is not plan and torch.equal(other.intervals, plan.intervals)
    assert MaskPlan.of(plan.intervals, 41).rows == 41
    # Dead plans don't haunt a tensor.
    intervals = plan.intervals
    del plan
    gc.collect()
    assert MaskPlan.of(intervals, 40) is other


def test_a_plan_of_one_row_serves_many():
    plan = MaskPlan.from_intervals(masks.causal(8, 8), 8)
    assert plan.expanded(1) is plan
    many = plan.expanded(3)
    assert many.batch == 3 and many is plan.expanded(3)
    assert torch.equal(many.dense(), plan.dense().expand(3, -1, -1, -1))
    with pytest.raises(ValueError, match="3 batch rows can't serve 2"):
        many.expanded(2)


def test_a_plan_counts_what_it_prepared():
    plan = MaskPlan.from_intervals(masks.causal(256, 256), 256)
    bare = plan.nbytes
    assert bare == plan.intervals.nbytes
    tiles = plan.row_tiles()
    assert plan.nbytes >= bare + tiles.entries.nbytes + tiles.offsets.nbytes


class Value:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_the_cache_lets_go_of_what_was_used_longest_ago():
    cache: ByteCache[Value] = ByteCache(100)
    first, second = cache.get("first", lambda: Value(40)), cache.get("second", lambda: Value(40))
    assert cache.get("first", lambda: Value(1)) is first
    cache.get("third", lambda: Value(40))
    assert len(cache) == 2
    assert cache.get("first", lambda: Value(1)) is first
    assert cache.get("second", lambda: Value(40)) is not second


def test_the_cache_hears_of_values_that_grow_and_keeps_the_newest():
    cache: ByteCache[Value] = ByteCache(100)
    cache.get("first", lambda: Value(10)).nbytes = 500
    cache.measure("first")
    assert cache.nbytes == 500 and len(cache) == 1
    newest = cache.get("second", lambda: Value(300))
    assert cache.nbytes == 300 and len(cache) == 1
    assert cache.get("second", lambda: Value(1)) is newest
    cache.measure("first")
    assert cache.nbytes == 300


def test_a_miss_takes_the_size_of_what_is_new_alone():
    """With many plans kept, summing up all of them at every miss took longer than building one."""

    class Counted(Value):
        asked = 0

        def __getattribute__(self, name: str):
            if name == "nbytes":
                Counted.asked += 1
            return super().__getattribute__(name)

    cache: ByteCache[Value] = ByteCache(1000)
    for key in range(100):
        cache.get(key, lambda: Counted(1))
    assert Counted.asked == 100 and cache.nbytes == len(cache) == 100


def test_the_cache_of_plans_knows_what_they_have_prepared(monkeypatch):
    cache: ByteCache[MaskPlan] = ByteCache(1 << 30)
    monkeypatch.setattr(plan_module, "_cache", cache)
    plans = [MaskPlan.cached(masks.document(300, 300, [length, 300 - length]), 300) for length in (60, 70)]
    for plan in plans:
        before = cache.nbytes
        plan.row_tiles()
        plan.expanded(2).row_tiles()
        assert cache.nbytes > before
    assert cache.nbytes == sum(plan.nbytes for plan in plans)


def test_threads_share_one_plan():
    mask = masks.document(300, 300, [100, 200])
    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(lambda _: MaskPlan.cached(mask.clone(), 300), range(32)))
    assert all(plan is plans[0] for plan in plans)
