"""The panel backend against the dense reference, forward and backward."""

import pytest
import torch

from ernie5.kernels.flashmask import MaskPlan, flashmask_attention
from ernie5.kernels.flashmask.attention import intervals_from_startend


def packed_intervals(rows: int, lengths: list[int], generator: torch.Generator) -> torch.Tensor:
    """Packed causal documents; in every second one the first half is a bidirectional block."""
    first_visible, document_end = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
    offset = 0
    for index, length in enumerate(lengths):
        end = min(rows, offset + length)
        first_visible[offset:end] = torch.arange(offset, end)
        if index % 2:
            first_visible[offset : offset + length // 2] = offset
        document_end[offset:end] = end
        offset = end
    assert offset == rows
    zero, full = torch.zeros_like(first_visible), torch.full_like(first_visible, rows)
    pairs = torch.stack((torch.stack((zero, first_visible), -1), torch.stack((document_end, full), -1)), -2)
    return pairs[None, None]


@pytest.mark.parametrize("rows,lengths", [(300, [40, 100, 160]), (513, [1, 12, 500]), (64, [64])])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (4, 4)])
def test_panels_equal_reference(rows, lengths, heads):
    generator = torch.Generator().manual_seed(rows)
    plan = MaskPlan.from_intervals(packed_intervals(rows, lengths, generator).repeat(2, 1, 1, 1, 1), rows)
    tensors = [
        torch.randn(2, rows, h, 32, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (heads[0], heads[1], heads[1])
    ]
    cotangent = torch.randn(2, rows, heads[0], 32, generator=generator, dtype=torch.float64)
    results = []
    for backend in ("panels", "reference"):
        out = flashmask_attention(*tensors, plan=plan, backend=backend)
        results.append((out, *torch.autograd.grad(out, tensors, cotangent)))
    for panel, reference in zip(*results):
        torch.testing.assert_close(panel, reference, rtol=0, atol=1e-10)


def test_rows_that_see_nothing_are_zero():
    intervals = torch.tensor([[0, 130]], dtype=torch.int32).expand(1, 1, 200, 1, 2).contiguous()
    plan = MaskPlan.from_intervals(intervals, 200)
    query, key, value = torch.randn(3, 1, 200, 2, 16).unbind(0)
    for backend in ("panels", "reference"):
        out = flashmask_attention(query, key, value, plan=plan, backend=backend)
        assert torch.isfinite(out).all()
        assert (out[:, :130] == 0).all() and (out[:, 130:] != 0).any()


@pytest.mark.parametrize("causal,bounds", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_startend_row_indices_have_paddles_meaning(causal, bounds):
    generator = torch.Generator().manual_seed(bounds)
    rows, columns = 9, 12
    s = torch.randint(0, rows + 1, (2, 1, columns, bounds), generator=generator, dtype=torch.int32)
    key = torch.zeros(2, columns, 1, 4)
    plan = MaskPlan.from_intervals(intervals_from_startend(s, rows, key, causal), rows)
    dense = plan.dense()
    for b in range(2):
        for row in range(rows):
            for j in range(columns):
                v = s[b, 0, j].tolist()
                hidden = causal and row < j - (columns - rows)
                if (causal, bounds) == (True, 1):
                    hidden |= row >= v[0]
                elif (causal, bounds) == (True, 2):
                    hidden |= v[0] <= row < v[1]
                elif (causal, bounds) == (False, 2):
                    hidden |= row >= v[0] or row < v[1]
                else:
                    hidden |= v[0] <= row < v[1] or v[2] <= row < v[3]
                assert dense[b, 0, row, j].item() is not hidden


def test_undefined_forms_are_refused():
    key = torch.zeros(1, 4, 1, 4)
    with pytest.raises(ValueError, match="not defined"):
        intervals_from_startend(torch.zeros(1, 1, 4, 4, dtype=torch.int32), 4, key, True)
    with pytest.raises(ValueError, match="int32"):
        intervals_from_startend(torch.zeros(1, 1, 4, 2), 4, key, False)


def test_no_tile_with_a_visible_pair_is_skipped():
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(0, 400, (1, 1, 390, 3, 1), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 300, (1, 1, 390, 3, 1), generator=generator, dtype=torch.int32)
    plan = MaskPlan.from_intervals(torch.cat((starts, starts + lengths), -1), 400)
    dense = plan.dense()
    for panel in range(plan.tiles.shape[2]):
        for block in range(plan.tiles.shape[3]):
            tile = dense[0, 0, panel * 64 : (panel + 1) * 64, block * 64 : (block + 1) * 64]
            assert plan.tiles[0, 0, panel, block] or not tile.any()
