"""Paddle's startend_row_indices: their meaning, row by row, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie5.kernels.flashmask import MaskPlan, masks
from ernie5.kernels.flashmask.paddle import intervals_from_startend, startend_from_intervals
from tests.kernels.flashmask_cases import MASKS, dense_visibility, mask_case

FORMS = [(False, 0), (True, 0), (True, 1), (True, 2), (False, 2), (False, 4)]


def paddle_hides(causal: bool, bounds: list[int], row: int, column: int, offset: int) -> bool:
    """The definition; ``offset`` is Nk - Nq."""
    hidden = causal and row < column - offset
    match bounds:
        case [start]:
            hidden |= row >= start
        case [start, end] if causal:
            hidden |= start <= row < end
        case [start, end]:
            hidden |= row >= start or row < end
        case [start, end, other_start, other_end]:
            hidden |= start <= row < end or other_start <= row < other_end
    return hidden


@given(
    st.sampled_from(FORMS),
    st.integers(1, 14),
    st.integers(1, 14),
    st.sampled_from([1, 2]),
    st.integers(0, 2**31),
)
@settings(deadline=None)
def test_bounds_mean_what_paddle_means(form, rows, columns, heads, seed):
    causal, count = form
    generator = torch.Generator().manual_seed(seed)
    shape = (2, heads, columns, count)
    indices = torch.randint(-2, rows + 3, shape, generator=generator, dtype=torch.int32) if count else None
    key = torch.zeros(2, columns, 2, 4)
    intervals = intervals_from_startend(indices, rows, key, causal)
    dense = MaskPlan.from_intervals(intervals, rows).dense()
    for batch in range(2):
        for head in range(dense.shape[1]):
            for j in range(columns):
                bounds = indices[batch, head, j].tolist() if indices is not None else []
                for row in range(rows):
                    hidden = paddle_hides(causal, bounds, row, j, columns - rows)
                    assert dense[batch, head, row, j].item() is not hidden
    # And back: perhaps in another form, but the same mask.
    again, also_causal = startend_from_intervals(intervals, rows)
    found = intervals_from_startend(again, rows, key, also_causal)
    expected = dense_visibility(intervals, rows)
    assert torch.equal(dense_visibility(found, rows).expand_as(expected), expected)
    if again is not None:
        assert again.dtype == torch.int32 and again.shape[-1] <= 4


EXPRESSIBLE = {
    "full": (False, None),
    "causal": (True, None),
    "causal_document": (True, 1),
    "document": (False, 2),
    "share_question": (True, 1),
    "global_sliding_window": (False, 4),
    "causal_blockwise": (True, 2),
    "prefix_lm_document": (False, 2),
    "random_eviction": (True, 1),
}


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_published_masks_take_the_form_they_are_published_in(name):
    indices, causal = startend_from_intervals(mask_case(name, 200, 200, 2, seed=1), 200)
    assert (causal, None if indices is None else indices.shape[-1]) == EXPRESSIBLE[name]


@pytest.mark.parametrize("name", MASKS)
def test_masks_survive_the_way_to_paddle_or_are_refused_for_cause(name):
    rows, columns = 180, 220
    for seed in range(3):
        intervals = mask_case(name, rows, columns, 2, seed)
        dense = dense_visibility(intervals, rows)
        try:
            indices, causal = startend_from_intervals(intervals, rows)
        except ValueError:
            # Some column must have three separate masked intervals.
            hidden = torch.nn.functional.pad(~dense, (0, 0, 1, 0)).int()
            assert ((hidden.diff(dim=2) == 1).sum(2) > 2).any()
            continue
        key = torch.zeros(1, columns, intervals.shape[1], 4)
        found = intervals_from_startend(indices, rows, key, causal)
        assert torch.equal(dense_visibility(found, rows), dense)


def test_a_mask_of_three_intervals_is_refused_by_name():
    intervals = torch.zeros(1, 2, 6, 3, 2, dtype=torch.int32)
    intervals[0, 1, 4] = torch.tensor([[0, 1], [2, 3], [4, 5]])
    with pytest.raises(
        ValueError, match=r"column 4 \(batch 0, head 1\) masks rows \[\[0, 1\], \[2, 3\], \[4, 5\]\]"
    ):
        startend_from_intervals(intervals, 8)


@pytest.mark.parametrize(
    "indices,causal,message",
    [
        (torch.zeros(1, 1, 4, 4, dtype=torch.int32), True, "4 bounds with causal=True are not defined"),
        (torch.zeros(1, 1, 4, 1, dtype=torch.int32), False, "1 bounds with causal=False are not defined"),
        (torch.zeros(1, 1, 4, 3, dtype=torch.int32), False, "3 bounds"),
        (torch.zeros(1, 1, 4, 2), False, "int32, got torch.float32"),
        (torch.zeros(1, 1, 4, 2, dtype=torch.int64), False, "int32, got torch.int64"),
        (torch.zeros(1, 4, 2, dtype=torch.int32), False, r"\[1, 4, 2\]"),
        (torch.zeros(2, 1, 4, 2, dtype=torch.int32), False, r"\[2, 1, 4, 2\]"),
        (torch.zeros(1, 1, 5, 2, dtype=torch.int32), False, r"\[1, 1, 5, 2\]"),
        (torch.zeros(1, 3, 4, 2, dtype=torch.int32), False, "3 heads; they take 1 or 2"),
    ],
)
def test_undefined_forms_are_refused(indices, causal, message):
    with pytest.raises(ValueError, match=message):
        intervals_from_startend(indices, 4, torch.zeros(1, 4, 2, 4), causal)


def test_windows_of_the_published_generator_and_of_the_argument_differ_by_one():
    """The published bounds of a window, LTS = j + w, mean keys (i - w, i]; ``window_size`` w is inclusive."""
    rows = 20
    bounds = (torch.arange(rows) + 5).clamp(max=rows).int().view(1, 1, rows, 1)
    published = intervals_from_startend(bounds, rows, torch.zeros(1, rows, 1, 4), True)
    assert torch.equal(
        dense_visibility(published, rows), dense_visibility(masks.sliding_window(rows, rows, 4), rows)
    )
