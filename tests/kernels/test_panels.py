"""The portable backends, by panels and by a dense mask, against the float64 definition."""

import pytest
import torch

from ernie5.kernels.flashmask import MaskPlan
from ernie5.kernels.flashmask.panels import panel_attention
from ernie5.kernels.flashmask.reference import dense_attention
from tests.kernels.flashmask_cases import MASKS, dense_visibility, mask_case, oracle_attention

BACKENDS = {"panels": panel_attention, "dense": dense_attention}


def run(attention, tensors, mask, cotangents):
    """Output, log-sum-exp and the three gradients, through both results."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    out, lse = attention(*inputs, mask)
    seen = torch.isfinite(lse)
    total = (out * cotangents[0].to(out.dtype)).sum() + (lse[seen] * cotangents[1].to(lse.dtype)[seen]).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(total, inputs)


def compare(attention, name, shape, heads, width, dtype, atol, batch=2, value_width=None):
    rows, columns = shape
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    intervals = mask_case(name, rows, columns, heads[1], seed=rows)
    tensors = [
        torch.randn(batch, n, h, d, generator=generator, dtype=torch.float64)
        for n, h, d in (
            (rows, heads[0], width),
            (columns, heads[1], width),
            (columns, heads[1], value_width or width),
        )
    ]
    out_shape = (batch, rows, heads[0], value_width or width)
    cotangents = (
        torch.randn(out_shape, generator=generator, dtype=torch.float64),
        torch.randn(
            batch, heads[0], rows, generator=generator
        ).double(),  # exact in the float32 of a gradient
    )
    tensors = [tensor.to(dtype) for tensor in tensors]
    plan = MaskPlan.from_intervals(intervals, rows)
    found = run(attention, tensors, plan, cotangents)
    wanted = run(
        oracle_attention, [t.double() for t in tensors], dense_visibility(intervals, rows), cotangents
    )
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    hidden = wanted[1] == float("-inf")
    assert torch.equal(found[1] == float("-inf"), hidden)
    assert (found[0].transpose(1, 2)[hidden] == 0).all()
    for a, b in zip(found, wanted):
        assert a.shape == b.shape
        # The log-sum-exp is float32 whatever the inputs.
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=max(atol, 1e-5 if a is found[1] else 0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", [(200, 200), (70, 130), (130, 70)])
def test_every_mask_forward_and_backward(backend, name, shape):
    compare(BACKENDS[backend], name, shape, (4, 2), 16, torch.float64, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (4, 4), (6, 3)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 77), (64, 128), (65, 129), (127, 31)])
def test_heads_and_lengths(backend, heads, shape):
    for name in ("random_eviction", "mixed", "qk_sparse"):
        compare(BACKENDS[backend], name, shape, heads, 8, torch.float64, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width,value_width", [(1, 1), (80, 80), (24, 40)])
def test_widths(backend, width, value_width):
    compare(
        BACKENDS[backend], "mixed", (100, 100), (2, 1), width, torch.float64, 1e-10, value_width=value_width
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype,atol", [(torch.float32, 2e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_lower_precision(backend, dtype, atol):
    compare(BACKENDS[backend], "mixed", (150, 150), (4, 2), 32, dtype, atol)


def test_results_do_not_depend_on_how_many_panels_run_at_once(monkeypatch):
    from ernie5.kernels.flashmask import panels

    def result():
        generator = torch.Generator().manual_seed(0)
        query, key, value = torch.randn(3, 1, 500, 2, 16, generator=generator).unbind(0)
        plan = MaskPlan.from_intervals(mask_case("causal_document", 500, 500, 2), 500)
        return panel_attention(query, key, value, plan)[0]

    together = result()
    monkeypatch.setattr(panels, "_SCORES", 1)
    monkeypatch.setattr(panels, "_KEEP_BELOW", 0)
    torch.testing.assert_close(result(), together, rtol=0, atol=1e-6)


def test_hidden_values_do_not_leak():
    """Infinities in what a row may not see stay out of its output."""
    rows = 130
    plan = MaskPlan.from_intervals(mask_case("causal", rows, rows, 1), rows)
    query, key, value = torch.randn(3, 1, rows, 1, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    clean = panel_attention(query, key, value, plan)[0]
    key[:, 100:], value[:, 100:] = 1e30, -1e30
    assert torch.equal(panel_attention(query, key, value, plan)[0][:, :100], clean[:, :100])


def test_any_strides():
    generator = torch.Generator().manual_seed(0)
    together = torch.randn(2, 90, 4, 3 * 16, generator=generator)
    views = together.split(16, -1)
    plan = MaskPlan.from_intervals(mask_case("causal", 90, 90, 4), 90)
    found = panel_attention(*views, plan)[0]
    assert torch.equal(found, panel_attention(*(view.contiguous() for view in views), plan)[0])
