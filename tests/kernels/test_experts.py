"""Grouped expert products against the loop over experts, forward and backward."""

import pytest
import torch

from ernie5.kernels.experts import sparse_swiglu, sparse_swiglu_reference


@pytest.mark.parametrize("tokens,slots,experts", [(37, 2, 5), (1, 1, 3), (64, 4, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_equals_loop(tokens, slots, experts, masked):
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    x, gate_up, down = random(tokens, 16), random(experts, 24, 16), random(experts, 16, 12)
    weight = torch.rand(tokens, slots, generator=generator).requires_grad_()
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, 0] = -1  # one expert without any token, where there is a choice
    expert = scores.topk(slots, -1).indices
    valid = torch.rand(tokens, slots, generator=generator) < 0.6 if masked else None
    cotangent = torch.randn(tokens, 16, generator=generator)
    results = []
    for function in (sparse_swiglu, sparse_swiglu_reference):
        out = function(x, gate_up, down, expert, weight, valid)
        results.append((out, *torch.autograd.grad(out, (x, gate_up, down, weight), cotangent)))
    for grouped, loop in zip(*results):
        torch.testing.assert_close(grouped, loop, rtol=1e-4, atol=1e-5)


def test_no_valid_slot_gives_zero():
    x = torch.randn(3, 8)
    expert = torch.zeros(3, 2, dtype=torch.long)
    out = sparse_swiglu(
        x,
        torch.randn(2, 8, 8),
        torch.randn(2, 8, 4),
        expert,
        torch.ones(3, 2),
        torch.zeros(3, 2, dtype=torch.bool),
    )
    assert torch.equal(out, torch.zeros(3, 8))
