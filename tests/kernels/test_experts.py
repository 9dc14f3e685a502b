"""The sparse feed-forward of every backend against the loop over experts, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from ernie5.kernels import experts_native
from ernie5.kernels.experts import sparse_swiglu

native = pytest.mark.skipif(
    not experts_native.supports(torch.zeros(1, 1)), reason="no native kernels on this machine"
)
FAST = ["grouped", pytest.param("native", marks=native)]
# tokens, slots, experts, width, hidden: one of each, odd sizes, several chunks, several blocks of the depth
SHAPES = [
    (1, 1, 3, 8, 8),
    (5, 4, 4, 30, 21),
    (11, 3, 5, 64, 37),
    (37, 2, 5, 16, 12),
    (64, 4, 4, 24, 20),
    (500, 2, 3, 40, 56),
    (130, 2, 4, 300, 280),
]


def problem(shape, dtype=torch.float32, weight_dtype=torch.float32, seed=0):
    tokens, slots, experts, width, hidden = shape
    generator = torch.Generator().manual_seed(seed)

    def random(*size, dtype=dtype):
        return torch.randn(*size, generator=generator).to(dtype).requires_grad_()

    x = random(tokens, width)
    gate_up = (random(experts, 2 * hidden, width).detach() / width**0.5).to(weight_dtype).requires_grad_()
    down = (random(experts, width, hidden).detach() / hidden**0.5).to(weight_dtype).requires_grad_()
    weight = torch.rand(tokens, slots, generator=generator).requires_grad_()
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, 0] = -1  # one expert without any token, where there is a choice
    expert = scores.topk(slots, -1).indices
    valid = torch.rand(tokens, slots, generator=generator) < 0.6
    cotangent = torch.randn(tokens, width, generator=generator)
    return (x, gate_up, down, weight), expert, valid, cotangent


def run(leaves, expert, valid, cotangent, backend):
    x, gate_up, down, weight = leaves
    out = sparse_swiglu(x, gate_up, down, expert, weight, valid, backend=backend)
    return (out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype)))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_fast_paths_equal_the_loop(backend, shape, masked):
    leaves, expert, valid, cotangent = problem(shape)
    fast = run(leaves, expert, valid if masked else None, cotangent, backend)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = run(exact, expert, valid if masked else None, cotangent, "reference")
    for name, ours, true in zip(("out", "x", "gate_up", "down", "weight"), fast, truth):
        error, scale = (ours.double() - true).abs().max().item(), true.abs().max().item()
        assert error <= 3e-6 * scale + 1e-6, (
            f"{name} is off by {error:.2g}; its largest element is {scale:.2g}"
        )


@native
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_tokens_meet_weights_of_either_precision(weight_dtype):
    """Master weights are read as they are: no copy in bfloat16 is made of them."""
    leaves, expert, valid, cotangent = problem((90, 2, 4, 48, 40), torch.bfloat16, weight_dtype)
    ours = run(leaves, expert, valid, cotangent, "native")
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = run(exact, expert, valid, cotangent, "reference")
    assert [t.dtype for t in ours] == [
        torch.float32,
        torch.bfloat16,
        weight_dtype,
        weight_dtype,
        torch.float32,
    ]
    for fast, true in zip(ours, truth):
        scale = true.abs().max().item()
        torch.testing.assert_close(fast.double(), true, rtol=0, atol=scale * 2**-8)


@native
def test_native_sums_run_in_a_fixed_order():
    leaves, expert, valid, cotangent = problem((400, 4, 8, 64, 48))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            results.append(run(leaves, expert, valid, cotangent, "native"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@native
def test_compiled_code_takes_new_token_counts_without_compiling_again():
    torch._dynamo.reset()
    graphs = []

    def count(graph, example):
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(sparse_swiglu, backend=count, dynamic=True)
    seen = []
    for tokens in (20, 33, 64, 90):
        leaves, expert, _, cotangent = problem((tokens, 2, 4, 16, 12), seed=tokens)
        x, gate_up, down, weight = leaves
        out = compiled(x, gate_up, down, expert, weight, backend="native")
        plain = sparse_swiglu(x, gate_up, down, expert, weight, backend="native")
        torch.testing.assert_close(out, plain)
        for a, b in zip(
            torch.autograd.grad(out, leaves, cotangent), torch.autograd.grad(plain, leaves, cotangent)
        ):
            torch.testing.assert_close(a, b)
        seen.append(len(graphs))
    assert seen[-1] == seen[1], f"graphs after each size: {seen}"


@pytest.mark.parametrize("backend", [*FAST, "reference"])
def test_no_valid_slot_gives_zero(backend):
    leaves, expert, valid, cotangent = problem((3, 2, 2, 8, 4))
    out, *grads = run(leaves, expert, torch.zeros_like(valid), cotangent, backend)
    assert torch.equal(out, torch.zeros(3, 8))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@native
def test_bad_input_is_refused(monkeypatch):
    (x, gate_up, down, weight), expert, valid, _ = problem((6, 2, 4, 8, 4))
    wrong = [
        ((x[0], gate_up, down, expert, weight), {}, "expected tokens"),
        ((x[:, :4], gate_up, down, expert, weight), {}, "do not fit"),
        ((x, gate_up[:2], down, expert, weight), {}, "do not fit"),
        ((x, gate_up, down, expert[:3], weight), {}, r"must be \[6, k\]"),
        ((x, gate_up, down, expert, weight, valid[:, :1]), {}, r"must be \[6, k\]"),
        ((x, gate_up, down, expert + 2, weight), {"backend": "native"}, "expert 5 was chosen, there are 4"),
        ((x, gate_up, down, expert - 3, weight), {}, "expert -[0-9] was chosen"),
        ((x, gate_up, down, expert.float(), weight), {}, "whole numbers"),
        ((x, gate_up.bfloat16(), down, expert, weight), {}, "weights must agree"),
        ((x, gate_up.half(), down.half(), expert, weight), {"backend": "native"}, "weights of torch.float16"),
        ((x, gate_up[:, :0], down[..., :0], expert, weight), {}, "without extent"),
        ((x, gate_up, down, expert.tolist(), weight), {}, "experts must be a tensor, got list"),
        ((x, gate_up, down, expert, weight.to("meta")), {}, "weights must be a dense tensor with data"),
        ((x.int(), gate_up, down, expert, weight), {}, "tokens must be floating-point"),
        ((x, gate_up, down, expert, weight.int()), {}, "weights must be floating-point"),
        ((x, gate_up, down, expert, weight, valid.float()), {}, "valid must be bool, got torch.float32"),
        ((x, gate_up, down, expert, weight), {"backend": "quick"}, "'quick'; known: auto, native"),
        ((x.double(), gate_up, down, expert, weight), {"backend": "native"}, "do not take torch.float64"),
    ]
    for arguments, keywords, message in wrong:
        with pytest.raises(ValueError, match=message):
            sparse_swiglu(*arguments, **keywords)
    monkeypatch.setenv("ERNIE_MULTI_EXPERTS", "loop")
    with pytest.raises(ValueError, match="'loop'"):
        sparse_swiglu(x, gate_up, down, expert, weight)


@native
def test_forward_mode_is_refused_where_there_is_none_and_right_where_there_is():
    """torch takes the missing tangent of an operator's result for 0."""
    leaves, expert, valid, cotangent = problem((6, 2, 4, 8, 4))
    for which in range(4):
        arguments = [leaf.detach() for leaf in leaves]
        tangent = torch.randn(arguments[which].shape, generator=torch.Generator().manual_seed(which))

        def experts(moved, backend, which=which, arguments=arguments):
            x, gate_up, down, weight = (*arguments[:which], moved, *arguments[which + 1 :])
            return sparse_swiglu(x, gate_up, down, expert, weight, valid, backend=backend)

        for backend, message in (("native", "native experts has no forward-mode"), ("grouped", "")):
            with pytest.raises((NotImplementedError, RuntimeError), match=message):
                torch.func.jvp(lambda x, b=backend: experts(x, b), (arguments[which],), (tangent,))
        found = torch.func.jvp(lambda x: experts(x, "reference"), (arguments[which],), (tangent,))[1]
        (gradient,) = torch.autograd.grad(
            experts(leaves[which], "native"), leaves[which], cotangent
        )  # <cotangent, J tangent> both ways
        torch.testing.assert_close(
            (found * cotangent).sum(), (gradient * tangent).sum(), rtol=1e-4, atol=1e-4
        )
    out = experts(leaves[3], "native")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="the gradient of native experts"):
        torch.autograd.grad(out, leaves[3], forward_ad.make_dual(cotangent, cotangent))


def test_float64_runs_by_definition():
    leaves, expert, valid, _ = problem((6, 2, 4, 8, 4), torch.float64, torch.float64)
    x, gate_up, down, weight = leaves
    out = sparse_swiglu(x, gate_up, down, expert, weight, valid)
    assert torch.equal(out, sparse_swiglu(x, gate_up, down, expert, weight, valid, backend="reference"))
