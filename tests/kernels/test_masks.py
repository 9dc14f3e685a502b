"""Mask builders against their definitions, pair by pair."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ernie5.kernels.flashmask import MaskPlan, masks, spans

SIZES = st.integers(1, 24)


def assert_sees(
    intervals: torch.Tensor, rows: int, columns: int, sees: Callable[[int, int], bool], head: int = 0
):
    """``sees(p, j)``: whether position p sees column j. Goes through a plan, so the form is checked too."""
    found = MaskPlan.from_intervals(intervals, rows).dense()[0, head]
    wanted = [[sees(i + columns - rows, j) for j in range(columns)] for i in range(rows)]
    assert found.tolist() == wanted


@st.composite
def partitions(draw, columns: int, least: int = 0) -> list[int]:
    """Up to five lengths of at least ``least`` (0 or 1) that sum up to ``columns``."""
    if columns < 2 * least:
        return [columns]
    cuts = draw(st.lists(st.integers(least, columns - least), max_size=4, unique=least > 0))
    edges = [0, *sorted(cuts), columns]
    return [end - start for start, end in pairwise(edges)]


def part_of(lengths: list[int], position: int) -> int:
    """Number of the part that a position lies in; -1 before all."""
    if position < 0:
        return -1
    for index, length in enumerate(lengths):
        position -= length
        if position < 0:
            return index
    raise AssertionError("position beyond all parts")


@given(SIZES, SIZES)
def test_full_and_causal(rows, columns):
    assert_sees(masks.full(rows, columns), rows, columns, lambda p, j: True)
    assert_sees(masks.causal(rows, columns), rows, columns, lambda p, j: j <= p)


@given(SIZES, SIZES, st.integers(0, 30), st.integers(0, 30))
def test_sliding_window(rows, columns, left, right):
    mask = masks.sliding_window(rows, columns, left, right)
    assert_sees(mask, rows, columns, lambda p, j: p - left <= j <= p + right)


@given(st.data(), SIZES, SIZES)
def test_documents(data, rows, columns):
    lengths = data.draw(partitions(columns))

    def together(p: int, j: int) -> bool:
        return part_of(lengths, p) == part_of(lengths, j)

    assert_sees(masks.document(rows, columns, lengths), rows, columns, together)
    causal = masks.causal_document(rows, columns, torch.tensor(lengths))
    assert_sees(causal, rows, columns, lambda p, j: together(p, j) and j <= p)


@given(st.data(), SIZES, SIZES)
def test_share_question(data, rows, columns):
    groups = [data.draw(partitions(length)) for length in data.draw(partitions(columns, 1))]
    parts = [(group, index) for group, lengths in enumerate(groups) for index, _ in enumerate(lengths)]
    flat = [length for lengths in groups for length in lengths]

    def sees(p: int, j: int) -> bool:
        if j > p:
            return False
        group, part = parts[part_of(flat, j)]
        row_group, row_part = parts[part_of(flat, p)]
        return group == row_group and part in (0, row_part)

    assert_sees(masks.share_question(rows, columns, groups), rows, columns, sees)


@given(SIZES, SIZES, st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_global_sliding_window(rows, columns, tokens, left, right):
    mask = masks.global_sliding_window(rows, columns, tokens, left, right)
    assert_sees(mask, rows, columns, lambda p, j: j < tokens or p < tokens or p - left <= j <= p + right)


@given(st.data(), SIZES, SIZES)
def test_causal_blockwise(data, rows, columns):
    lengths = data.draw(partitions(columns, 1))
    last = len(lengths) - 1

    def sees(p: int, j: int) -> bool:
        return j <= p and (part_of(lengths, p) in (last, part_of(lengths, j)))

    assert_sees(masks.causal_blockwise(rows, columns, lengths), rows, columns, sees)


@given(st.data(), SIZES, SIZES)
def test_prefix_lm(data, rows, columns):
    prefix = data.draw(st.integers(0, columns))
    causal = masks.prefix_lm_causal(rows, columns, prefix)
    assert_sees(causal, rows, columns, lambda p, j: j < prefix or j <= p)

    lengths = data.draw(partitions(columns, 1))
    prefixes = [data.draw(st.integers(0, length)) for length in lengths]
    documents = [(prefix, length - prefix) for prefix, length in zip(prefixes, lengths)]

    def sees(p: int, j: int) -> bool:
        document = part_of(lengths, j)
        inside = j - sum(lengths[:document])
        return part_of(lengths, p) == document and (inside < prefixes[document] or j <= p)

    assert_sees(masks.prefix_lm_document(rows, columns, documents), rows, columns, sees)


@given(st.data(), SIZES, SIZES)
def test_dropped_and_evicted_keys_differ_by_head(data, rows, columns):
    dropped = torch.tensor(
        [data.draw(st.lists(st.booleans(), min_size=columns, max_size=columns)) for _ in "ab"]
    )
    evicted = torch.tensor(
        [data.draw(st.lists(st.integers(0, columns + 2), min_size=columns, max_size=columns)) for _ in "ab"]
    )
    for head in range(2):
        assert_sees(
            masks.qk_sparse(rows, columns, dropped),
            rows,
            columns,
            lambda p, j, head=head: j <= p and not dropped[head, j],
            head,
        )
        assert_sees(
            masks.random_eviction(rows, columns, evicted),
            rows,
            columns,
            lambda p, j, head=head: j <= p < evicted[head, j],
            head,
        )


def test_random_evictions_spare_the_key_itself_and_early_rows():
    evicted = masks.random_evictions(500, 3, 200, torch.Generator().manual_seed(0))
    position = torch.arange(500)
    assert evicted.shape == (3, 500)
    assert (evicted > position).all() and (evicted >= 200).all() and (evicted <= 500).all()
    assert not torch.equal(evicted[0], evicted[1])
    assert evicted[:, 0].float().std() > 0


def test_batched_masks_keep_their_rows():
    both = masks.batched(masks.causal(6, 6), masks.document(6, 6, [2, 4]), masks.full(6, 6))
    assert both.shape == (3, 1, 6, 2, 2)
    dense = MaskPlan.from_intervals(both, 6).dense()
    for index, mask in enumerate((masks.causal(6, 6), masks.document(6, 6, [2, 4]), masks.full(6, 6))):
        assert torch.equal(dense[index], MaskPlan.from_intervals(mask, 6).dense()[0])


@pytest.mark.parametrize(
    "build,message",
    [
        (lambda: masks.document(8, 8, [3, 4]), "7 positions together, the mask has 8 columns"),
        (lambda: masks.causal_document(8, 8, [9, -1]), "0 or more"),
        (lambda: masks.sliding_window(8, 8, -1), "0 or more"),
        (lambda: masks.global_sliding_window(8, 8, -2, 1, 1), "0 or more"),
        (lambda: masks.prefix_lm_causal(8, 8, 9), "within the 8 columns"),
        (lambda: masks.qk_sparse(8, 8, torch.zeros(7, dtype=torch.bool)), "8 columns"),
        (lambda: masks.random_eviction(8, 8, torch.zeros(1, 7)), "8 columns"),
        (lambda: spans.packed(8, 8, [[spans.text(9)]]), "9 positions do not fit 8 columns"),
        (lambda: spans.sound_window(4, 0), "at least the frame itself"),
        (lambda: spans.video([1, 1], [False, False], 0), "at least the frame itself"),
        (lambda: spans.windows_by_length([5], [(1, 4)]), "ascend from length 0"),
        (lambda: spans.windows_by_length([5], [(0, 4), (0, 2)]), "ascend from length 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
