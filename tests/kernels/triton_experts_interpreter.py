"""The fused expert kernels in Triton's interpreter; ``test_triton_experts.py`` runs it in its own process."""

from __future__ import annotations

import pytest
import torch

from ernie5.kernels.experts import sparse_swiglu_reference
from ernie5.kernels.experts_triton import sparse_swiglu_triton


@pytest.mark.parametrize("tokens,slots,experts", [(21, 2, 5), (1, 1, 3), (10, 4, 4)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_equals_the_loop_over_experts(tokens, slots, experts, masked, dtype, tolerance):
    """Widths that no tile divides, an expert without tokens, slots that are left out, a strided input."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) / 4).to(dtype)

    x, gate_up, down = random(tokens, 2, 40)[:, 0], random(experts, 72, 40), random(experts, 40, 36)
    weight = torch.rand(tokens, slots, generator=generator)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, 0] = -1  # no token, where there is a choice
    expert = scores.topk(slots, -1).indices
    valid = torch.rand(tokens, slots, generator=generator) < 0.6 if masked else None
    got = sparse_swiglu_triton(x, gate_up, down, expert, weight, valid)
    want = sparse_swiglu_reference(
        x.double(), gate_up.double(), down.double(), expert, weight.double(), valid
    )
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_no_valid_slot_gives_zero():
    expert = torch.zeros(3, 2, dtype=torch.long)
    out = sparse_swiglu_triton(
        torch.randn(3, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 4), expert, torch.ones(3, 2), expert.bool()
    )
    assert torch.equal(out, torch.zeros(3, 8))


def test_gradients_are_refused():
    x = torch.randn(3, 8, requires_grad=True)
    expert = torch.zeros(3, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="no backward"):
        sparse_swiglu_triton(x, torch.randn(2, 8, 8), torch.randn(2, 8, 4), expert, torch.ones(3, 2))
