"""The chunked cross-entropy of a linear head against all logits at once."""

from __future__ import annotations

import pytest
import torch

from ernie5.kernels import cross_entropy
from ernie5.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference


@pytest.mark.parametrize("positions,vocabulary", [(0, 5), (1, 2), (37, 50), (300, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_chunks_equal_all_logits(positions, vocabulary, dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK", 7 * vocabulary)
    generator = torch.Generator().manual_seed(positions)
    hidden = (torch.randn(positions, 16, generator=generator) * 3).to(dtype).requires_grad_()
    # Master weights are wider than bfloat16 positions.
    head = torch.randn(vocabulary, 16, generator=generator).to(torch.promote_types(dtype, torch.float32))
    head.requires_grad_()
    target = torch.randint(0, vocabulary, (positions,), generator=generator)
    weight = torch.rand(positions, generator=generator)
    results = []
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        loss = function(hidden, head, target, weight) * 0.5
        grads = torch.autograd.grad(loss, (hidden, head), retain_graph=True)
        again = torch.autograd.grad(loss, (hidden, head))
        assert all(torch.equal(a, b) for a, b in zip(grads, again))
        results.append((loss, *grads))
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for ours, plain in zip(*results):
        assert ours.dtype == plain.dtype
        scale = plain.double().abs().max().item() if plain.numel() else 0.0
        torch.testing.assert_close(ours, plain, rtol=0, atol=tolerance * (scale + 1e-6))


def test_certain_and_impossible_answers_stay_finite():
    """Logits a thousand apart: the loss is their distance, not infinity."""
    head = torch.tensor([[1000.0], [0.0]], requires_grad=True)
    hidden = torch.ones(2, 1, requires_grad=True)
    loss = linear_cross_entropy(hidden, head, torch.tensor([0, 1]), torch.ones(2))
    assert loss.item() == 1000
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(loss, (hidden, head)))


def test_bad_shapes_are_refused():
    hidden, head = torch.randn(4, 3), torch.randn(5, 3)
    target, weight = torch.zeros(4, dtype=torch.long), torch.ones(4)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden[:, :2], head, target, weight)
    with pytest.raises(ValueError, match=r"must be \[4\]"):
        linear_cross_entropy(hidden, head, target[:3], weight)
    for wrong in (-100, 5):
        with pytest.raises(ValueError, match=rf"targets must be in \[0, 5\), got {wrong}"):
            linear_cross_entropy(hidden, head, torch.full_like(target, wrong), weight)
    with pytest.raises(ValueError, match=r"targets must be int64, got torch\.float32"):
        linear_cross_entropy(hidden, head, target.float(), weight)
    with pytest.raises(ValueError, match="targets must be a tensor, got list"):
        linear_cross_entropy(hidden, head, target.tolist(), weight)
    with pytest.raises(ValueError, match="no rows"):
        linear_cross_entropy(hidden, head[:0], target, weight)


def test_second_derivatives_are_refused():
    """They would be wrong: the gradient is made in the forward pass."""
    hidden, head = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3)
    loss = linear_cross_entropy(hidden, head, torch.zeros(4, dtype=torch.long), torch.ones(4))
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()
