"""The Triton kernels in Triton's interpreter, against float64. Run by ``test_triton.py`` in a process of its
own, since Triton decides at its import whether functions are interpreted.

bfloat16 is left out: Triton 3.7's interpreter multiplies its raw bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ernie5.kernels.flashmask import triton_configs
from ernie5.kernels.flashmask.plan import MaskPlan
from ernie5.kernels.flashmask.triton_backend import triton_backward, triton_forward
from ernie5.kernels.flashmask.triton_configs import TileConfig
from tests.kernels.flashmask_cases import MASKS, dense_visibility, mask_case, oracle_attention

TILES = (TileConfig(32, 64, 4, 1, True), TileConfig(64, 32, 4, 1), TileConfig(64, 64, 4, 1, True))


@pytest.fixture(autouse=True)
def forget_choices():
    yield
    triton_configs._chosen.clear()


def compare(
    intervals: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    tiles: TileConfig,
    tolerance: float,
    scale: float | None = None,
) -> None:
    """Forward, log-sum-exp and all gradients against the oracle."""
    rows, width = query.shape[1], query.shape[3]
    scale = width**-0.5 if scale is None else scale
    plan = MaskPlan.from_intervals(intervals, rows)
    for kernel in ("forward", "dkdv", "dq"):
        key_of_kernel = triton_configs.config_key(kernel, query, plan.intervals.shape[3])
        triton_configs.choose(key_of_kernel, tiles)
    out, lse, lost = triton_forward(query, key, value, plan, scale, keep_lost=True)
    assert (lost is None) == (query.dtype == torch.float32)
    grads = triton_backward(grad_out, query, key, value, out, lost, lse, plan, scale)

    wide = [t.double().requires_grad_() for t in (query, key, value)]
    right, right_lse = oracle_attention(*wide, dense_visibility(intervals, rows), scale)
    right_grads = torch.autograd.grad(right, wide, grad_out.double())
    assert out.dtype == query.dtype and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=1e-5)
    for got, want in zip((out, *grads), (right, *right_grads)):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name):
    """Nq and Nk that no tile divides; grouped queries, or a mask of its own for each key head."""
    rows, columns = (70, 101) if MASKS.index(name) % 2 else (101, 75)
    intervals = mask_case(name, rows, columns, key_heads=2, seed=1)
    key_heads = intervals.shape[1]
    query, key = draw(1, rows, 2, 16, seed=1), draw(1, columns, key_heads, 16, seed=2)
    value, grad_out = draw(1, columns, key_heads, 16, seed=3), draw(1, rows, 2, 16, seed=4)
    compare(intervals, query, key, value, grad_out, TILES[MASKS.index(name) % 3], 2e-6)


def test_groups_with_a_mask_for_each_key_head():
    intervals = mask_case("random_eviction", 60, 60, key_heads=2)
    assert intervals.shape[1] == 2
    query, grad_out = draw(1, 60, 4, 16, seed=1), draw(1, 60, 4, 16, seed=2)
    key, value = draw(1, 60, 2, 16, seed=3), draw(1, 60, 2, 16, seed=4)
    compare(intervals, query, key, value, grad_out, TILES[0], 2e-6)


@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 3e-6), (torch.float16, 3e-3)])
def test_head_dims_and_types(width, dtype, tolerance):
    rows = 90
    intervals = mask_case("mixed", rows, rows, key_heads=1, seed=2)
    query, key, value, grad_out = (draw(1, rows, 1, width, dtype=dtype, seed=s) for s in range(4))
    compare(intervals, query, key, value, grad_out, TILES[1], tolerance)


def test_gradients_in_16_bits_bear_values_that_have_much_in_common():
    """There the gradient of a score is a small difference of large numbers, of which the output is one;
    without what rounding took from it, dQ and dK are four times as far off."""
    rows, plan = 60, MaskPlan.from_intervals(mask_case("causal", 60, 60, 1), 60)
    query, key, value, grad_out = (draw(1, rows, 1, 16, dtype=torch.float16, seed=s) for s in range(4))
    value = value + 50
    out, lse, lost = triton_forward(query, key, value, plan, 0.25, keep_lost=True)
    wide = [t.double().requires_grad_() for t in (query, key, value)]
    right, _ = oracle_attention(*wide, plan.dense(), 0.25)
    truths = torch.autograd.grad(right, wide, grad_out.double())
    for kept, within in ((lost, 1e-2), (None, 1.0)):
        grads = triton_backward(grad_out, query, key, value, out, kept, lse, plan, 0.25)
        errors = [(got.double() - want).abs().max().item() for got, want in zip(grads, truths)]
        assert max(errors) < within and (kept is not None or errors[1] > 2e-2), errors


@pytest.mark.parametrize("rows,columns", [(1, 1), (1, 40), (40, 1), (64, 64), (65, 33)])
def test_edges_of_shape(rows, columns):
    intervals = mask_case("causal", rows, columns, key_heads=1)
    query, grad_out = draw(2, rows, 2, 16, seed=1), draw(2, rows, 2, 16, seed=2)
    key, value = draw(2, columns, 1, 16, seed=3), draw(2, columns, 1, 16, seed=4)
    compare(intervals.expand(2, -1, -1, -1, -1), query, key, value, grad_out, TILES[2], 2e-6)


def test_a_mask_for_each_row_of_the_batch():
    """Rows that see nothing included: the second row of the batch masks its first 40 queries wholly."""
    intervals = torch.cat([mask_case("document", 80, 80, 1, seed) for seed in (3, 4)])
    intervals[1, :, :, :, :] = torch.tensor([[0, 40], *[[40, 40]] * (intervals.shape[3] - 1)]).int()
    query, key, value, grad_out = (draw(2, 80, 1, 16, seed=s) for s in range(4))
    compare(intervals, query, key, value, grad_out, TILES[2], 2e-6)
    out, lse, _ = triton_forward(query, key, value, MaskPlan.from_intervals(intervals, 80), 0.25)
    assert (out[1, :40] == 0).all() and (lse[1, :, :40] == -torch.inf).all()


def test_views_of_one_tensor_and_strided_gradients():
    """Query, key and value as views of one projection, an expanded gradient, one mask for the batch."""
    packed = draw(2, 60, 3, 2, 32)
    query, key, value = packed.unbind(2)
    assert not query.is_contiguous()
    grad_out = torch.ones(()).expand(2, 60, 2, 32)
    compare(mask_case("causal", 60, 60, 1), query, key, value, grad_out, TILES[0], 2e-6, scale=0.3)


@pytest.mark.parametrize("scale", [0.0, 4.0])
def test_scales(scale):
    """A scale of 0 weighs all visible keys alike; a large one makes weights nearly one-hot."""
    query, key, value, grad_out = (draw(1, 50, 1, 16, seed=s) for s in range(4))
    intervals = mask_case("sliding_window", 50, 50, 1)
    compare(intervals, query, key, value, grad_out, TILES[2], 5e-5, scale=scale)


def test_large_scores_overflow_nothing():
    query, key, value, grad_out = (draw(1, 50, 1, 16, seed=s) for s in range(4))
    compare(mask_case("causal", 50, 50, 1), 100 * query, key, value, grad_out, TILES[2], 2e-3)


def test_equal_inputs_give_equal_bits():
    query, key, value, grad_out = (draw(1, 70, 2, 16, seed=s) for s in range(4))
    plan = MaskPlan.from_intervals(mask_case("mixed", 70, 70, 2, seed=5), 70)
    results = []
    for _ in range(2):
        out, lse, lost = triton_forward(query, key, value, plan, 0.25)
        results.append((out, lse, *triton_backward(grad_out, query, key, value, out, lost, lse, plan, 0.25)))
    assert all(torch.equal(first, second) for first, second in zip(*results))


def test_bad_inputs_are_refused():
    query = draw(1, 8, 2, 16)
    plan = MaskPlan.from_intervals(mask_case("causal", 8, 8, 1), 8)
    with pytest.raises(ValueError, match="float64"):
        triton_forward(query.double(), query.double(), query.double(), plan, 0.25)
    with pytest.raises(ValueError, match="272 is over the limit of 256"):
        wide = draw(1, 8, 2, 272)
        triton_forward(wide, wide, wide, plan, 0.25)
    with pytest.raises(ValueError, match="8 rows and 8 columns"):
        triton_forward(query[:, :7], query, query, plan, 0.25)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        triton_forward(query, query, query, plan, -1)
    with pytest.raises(ValueError, match="do not fit"):
        triton_forward(query, query[..., :8], query[..., :8], plan, 0.25)
