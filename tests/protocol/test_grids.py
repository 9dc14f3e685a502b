"""Schedules halve from the final grid down to one cell."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie5.protocol.grids import GRIDS, schedule_for

sides = st.integers(1, 300)


@given(sides, sides)
def test_a_schedule_halves_down_to_one_cell(height: int, width: int) -> None:
    schedule = schedule_for((height, width))
    assert schedule[0] == (1, 1) and schedule[-1] == (height, width)
    for (low_h, low_w), (high_h, high_w) in itertools.pairwise(schedule):
        assert (low_h, low_w) == ((high_h + 1) // 2, (high_w + 1) // 2)
        assert (low_h, low_w) != (high_h, high_w)


@given(sides, sides)
def test_a_schedule_turns_with_its_grid(height: int, width: int) -> None:
    turned = tuple((w, h) for h, w in schedule_for((height, width)))
    assert turned == schedule_for((width, height))


@pytest.mark.parametrize("grid", [(0, 1), (1, 0), (-1, 4)])
def test_an_empty_grid_is_refused(grid: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is empty"):
        schedule_for(grid)


def test_grids_are_distinct_with_even_sides() -> None:
    assert len(set(GRIDS)) == len(GRIDS)
    assert all(height % 2 == 0 and width % 2 == 0 for height, width in GRIDS)
    assert all((width, height) in GRIDS for height, width in GRIDS)
