"""The order of an epoch: every sample once, another order for every epoch and seed, for good."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie5.corpora.order import position_to_index

seeds = st.integers(min_value=-(2**63), max_value=2**64)


@given(seed=seeds, epoch=st.integers(0, 10**6), length=st.integers(1, 300))
def test_every_index_is_visited_exactly_once(seed, epoch, length):
    visited = [position_to_index(seed, epoch, position, length) for position in range(length)]
    assert sorted(visited) == list(range(length))


@given(seed=seeds, length=st.integers(1, 2**60), data=st.data())
def test_index_lies_in_the_corpus_however_long_it_is(seed, length, data):
    position = data.draw(st.integers(0, length - 1))
    assert 0 <= position_to_index(seed, 0, position, length) < length


def test_epochs_and_seeds_differ_and_repeat_themselves():
    def order(seed, epoch):
        return [position_to_index(seed, epoch, position, 500) for position in range(500)]

    orders = {(seed, epoch): tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == 16
    assert tuple(order(2, 3)) == orders[2, 3]


def test_the_order_never_changes_between_versions():
    # A resumed run relies on it; these values were computed once.
    assert [position_to_index(7, 1, position, 10) for position in range(10)] == GOLDEN_10
    assert [position_to_index(7, 1, position, 10**6) for position in range(4)] == GOLDEN_MILLION


def test_neighbours_are_spread_out():
    # Uniform draws: the mean distance of successive indices is a third of the length, within sampling error.
    length = 3000
    indices = [position_to_index(0, 0, position, length) for position in range(length)]
    distance = sum(abs(a - b) for a, b in pairwise(indices)) / (length - 1)
    assert 0.30 * length < distance < 0.37 * length


@pytest.mark.parametrize(("epoch", "position", "length"), [(0, 5, 5), (0, -1, 5), (0, 0, 0), (-1, 0, 5)])
def test_impossible_positions_are_refused(epoch, position, length):
    with pytest.raises(ValueError, match=r"position|epoch"):
        position_to_index(0, epoch, position, length)


GOLDEN_10 = [3, 8, 6, 1, 0, 9, 2, 4, 7, 5]
GOLDEN_MILLION = [836194, 250133, 876240, 635280]
