"""The door to attention: what it takes and refuses, its backends, torch.compile."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from ernie5.kernels.flashmask import MaskPlan, flashmask_attention, native
from ernie5.kernels.flashmask import plan as plan_module
from tests.kernels.conformance import CASES, check, tensors
from tests.kernels.flashmask_cases import dense_visibility, mask_case

needs_native = pytest.mark.skipif(
    not native.supports(torch.zeros(1, 1, 1, 8)), reason="no native kernels on this machine"
)


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_panels_conform(case):
    check(case, torch.float32, backend="panels")


def test_windows_are_inclusive():
    """``window_size`` reaches keys [i - left, i + right], unlike a mask whose bound excludes its end."""
    query, key, value = tensors(1, 20, 20, 1, 1, 8, torch.float64, seed=0)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    for window, causal, visible in (
        (3, True, (distance >= 0) & (distance <= 3)),
        (3, False, distance.abs() <= 3),
        ((4, 1), False, (distance <= 4) & (distance >= -1)),
    ):
        out = flashmask_attention(query, key, value, window_size=window, causal=causal)
        scores = torch.einsum("bihd,bjhd->bhij", query, key) / 8**0.5
        plain = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value.transpose(1, 2)
        torch.testing.assert_close(out, plain.transpose(1, 2))


@needs_native
def test_backends_agree_and_are_chosen_by_argument_and_environment(monkeypatch):
    inputs = tensors(2, 100, 100, 4, 2, 32, torch.float32, seed=1)
    plan = MaskPlan.from_intervals(mask_case("mixed", 100, 100, 2), 100)
    plain = flashmask_attention(*inputs, plan=plan, backend="reference")
    for name in ("native", "panels"):
        torch.testing.assert_close(
            flashmask_attention(*inputs, plan=plan, backend=name), plain, atol=1e-5, rtol=0
        )
    called = []
    monkeypatch.setattr(
        native,
        "native_forward",
        lambda *a: called.append(1) or (plain.detach().clone(), plain[..., 0].detach().clone(), None),
    )
    flashmask_attention(*inputs, plan=plan)
    assert called == [1]
    monkeypatch.setenv("ERNIE_MULTI_ATTENTION", "panels")
    flashmask_attention(*inputs, plan=plan)
    assert called == [1]
    monkeypatch.setenv("ERNIE_MULTI_ATTENTION", "fast")
    with pytest.raises(ValueError, match="'fast'; known: auto, native"):
        flashmask_attention(*inputs, plan=plan)


@needs_native
def test_compiled_code_takes_new_lengths_and_masks_without_compiling_again():
    torch._dynamo.reset()
    graphs = []

    def count(graph, example):
        graphs.append(1)
        return graph.forward

    def layer(query, key, value, plan):
        return flashmask_attention(query * 2.0, key, value, plan=plan).square()

    compiled = torch.compile(layer, backend=count, dynamic=True, fullgraph=True)
    seen = []
    for rows in (65, 90, 128, 300):
        inputs = tensors(1, rows, rows, 2, 1, 16, torch.float32, seed=rows)
        plan = MaskPlan.from_intervals(mask_case("causal_document", rows, rows, 1), rows)
        out = compiled(*inputs, plan)
        plain = layer(*inputs, plan)
        torch.testing.assert_close(out, plain)
        for ours, theirs in zip(
            torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(plain.sum(), inputs)
        ):
            torch.testing.assert_close(ours, theirs)
        seen.append(len(graphs))
    assert seen[-1] == seen[1], f"graphs after each length: {seen}"


@needs_native
@pytest.mark.parametrize(
    "dtype,train", [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)]
)
def test_operators_describe_themselves_rightly(dtype, train):
    query, key, value = tensors(1, 40, 40, 2, 1, 16, dtype, seed=0)
    plan = MaskPlan.from_intervals(mask_case("causal", 40, 40, 1), 40)
    torch.library.opcheck(
        torch.ops.ernie5.flashmask_attention.default,
        (query, key, value, plan.intervals, 0.25, "native", train),
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        ),
    )


@needs_native
def test_what_rounding_took_is_kept_for_training_in_16_bits_only(monkeypatch):
    kept = []

    def spied(*arguments, run=native.native_forward):
        results = run(*arguments)
        kept.append(results[2])
        return results

    monkeypatch.setattr(native, "native_forward", spied)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = tensors(1, 20, 20, 2, 1, 8, dtype, seed=0)
        flashmask_attention(*inputs, causal=True, backend="native")
        with torch.no_grad():
            flashmask_attention(*inputs, causal=True, backend="native")
        flashmask_attention(*(t.detach() for t in inputs), causal=True, backend="native")
    assert [lost is not None for lost in kept] == [False, False, False, True, False, False]


@needs_native
def test_gradients_in_16_bits_bear_values_that_have_much_in_common():
    """Where all values are near 50 the gradient of a score is a small difference of large numbers."""
    query, key, value = (t.detach() for t in tensors(1, 60, 60, 2, 1, 16, torch.bfloat16, seed=2))
    leaves = [query.requires_grad_(), key.requires_grad_(), (value + 50).requires_grad_()]
    cotangent = torch.randn(query.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = [t.detach().double().requires_grad_() for t in leaves]
    grads, truths = (
        torch.autograd.grad(
            flashmask_attention(*inputs, causal=True, backend=backend), inputs, cotangent.to(inputs[0].dtype)
        )
        for inputs, backend in ((leaves, "native"), (exact, "reference"))
    )
    for ours, true in zip(grads, truths):
        torch.testing.assert_close(ours.double(), true, atol=1e-2, rtol=1e-2)


@needs_native
def test_paddles_form_builds_its_plan_once_for_both_passes(monkeypatch):
    """The plan dies with the call unless the graph holds it; the backward pass built another one then."""
    made = []
    monkeypatch.setattr(
        plan_module,
        "checked_intervals",
        lambda *a, check=plan_module.checked_intervals: made.append(1) or check(*a),
    )
    query, key, value = tensors(1, 90, 90, 2, 1, 16, torch.float32, seed=11)
    bounds = torch.full((1, 1, 90, 1), 77, dtype=torch.int32)
    for count in (1, 2):
        out = flashmask_attention(query, key, value, bounds, causal=True, backend="native")
        gc.collect()
        torch.autograd.grad(out.sum(), (query, key, value))
        assert len(made) == count


def derivative(function, primal, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(primal, tangent))).tangent


@needs_native
@pytest.mark.parametrize("which", [0, 1, 2])
def test_forward_mode_is_refused_where_there_is_none_and_right_where_there_is(which):
    """torch takes a missing tangent for 0: a wrong derivative without a word."""
    inputs = [t.detach().double() for t in tensors(1, 40, 40, 2, 1, 8, torch.float32, seed=6)]
    tangent = torch.randn(inputs[which].shape, generator=torch.Generator().manual_seed(7)).double()

    def attention(moved, backend, kind=torch.float64):
        arguments = [t.to(kind) for t in inputs]
        arguments[which] = moved
        return flashmask_attention(*arguments, window_size=5, backend=backend)

    single = inputs[which].float()
    for differentiate in (lambda f, *x: torch.func.jvp(f, x[:1], x[1:]), derivative):
        with pytest.raises(
            NotImplementedError, match=r"native attention has no forward-mode .*='reference' has"
        ):
            differentiate(lambda x: attention(x, "native", torch.float32), single, tangent.float())
        with pytest.raises((NotImplementedError, RuntimeError)):
            differentiate(lambda x: attention(x, "panels"), inputs[which], tangent)
    found = torch.func.jvp(lambda x: attention(x, "reference"), (inputs[which],), (tangent,))[1]
    step = 1e-6
    ahead, behind = (attention(inputs[which] + sign * step * tangent, "panels") for sign in (1, -1))
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)


@needs_native
def test_forward_over_reverse_is_refused_too():
    query, key, value = tensors(1, 40, 40, 2, 1, 8, torch.float32, seed=6)
    out = flashmask_attention(query, key, value, causal=True, backend="native")
    with pytest.raises(NotImplementedError, match="the gradient of native attention has no forward-mode"):
        derivative(
            lambda grad: torch.autograd.grad(out, query, grad)[0], torch.ones_like(out), torch.ones_like(out)
        )


def test_the_reference_is_differentiable_twice_and_by_all_modes():
    inputs = [t.double().detach().requires_grad_() for t in tensors(1, 5, 7, 2, 1, 3, torch.float32, seed=8)]
    plan = MaskPlan.from_intervals(mask_case("sliding_window", 5, 7, 1), 5)

    def attention(*arguments):
        return flashmask_attention(*arguments, plan=plan, backend="reference")

    assert torch.autograd.gradcheck(attention, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(attention, inputs)
    batch = torch.stack([inputs[0], 2 * inputs[0]])
    torch.testing.assert_close(
        torch.func.vmap(lambda q: attention(q, *inputs[1:]))(batch)[1],
        attention(*[2 * inputs[0], *inputs[1:]]),
    )


def test_bad_shapes_dtypes_and_plans_are_refused():
    q, k, v = torch.randn(3, 2, 12, 4, 8).unbind(0)
    plan = MaskPlan.from_intervals(mask_case("causal", 12, 12, 1), 12)
    bounds = torch.full((2, 1, 12, 1), 12, dtype=torch.int32)
    wrong = [
        ((q[0], k, v), {}, r"query must be \[B, N, H, D\]"),
        ((q, k.double(), v), {}, "key is torch.float64"),
        ((q.int(), k.int(), v.int()), {}, "floating-point"),
        ((q, k, v[:, :6]), {}, "differ in shape"),
        ((q, k[:1], v[:1]), {}, "differ in B or D"),
        ((q, k[..., :4], v[..., :4]), {}, "differ in B or D"),
        ((q[:, :, :3], k[:, :, :2], v[:, :, :2]), {}, "3 query heads are not a multiple of 2"),
        ((q[:, :0], k, v), {}, "nothing to attend"),
        ((q[:, :6], k, v), {"plan": plan}, "the plan is for 12 rows"),
        ((q, k, v), {"plan": plan, "causal": True}, "a plan is the whole mask"),
        (
            (q, k, v),
            {"plan": MaskPlan.from_intervals(plan.intervals.repeat(3, 1, 1, 1, 1), 12)},
            "3 batch entries",
        ),
        ((q, k, v), {"backend": "quick"}, "unknown attention backend 'quick'"),
        ((q, k, v), {"window_size": -1, "causal": True}, "-1"),
        ((q, k, v), {"window_size": 3.5}, "whole number"),
        ((q, k, v), {"window_size": (3,)}, "whole number"),
        ((q, k, v), {"softmax_scale": float("nan")}, "finite"),
        ((q.numpy(), k, v), {}, "query must be a tensor, got ndarray"),
        ((q.to_sparse(), k, v), {}, "query must be a dense tensor"),
        ((q.to("meta"), k.to("meta"), v.to("meta")), {}, "with data, got .* on meta"),
        ((q, k.to("meta"), v), {}, "key .* on meta"),
        (tuple(t.to(torch.float8_e5m2) for t in (q, k, v)), {}, "16, 32 or 64 bits, got torch.float8_e5m2"),
        ((q, k, v), {"plan": plan.intervals}, "plan must be a MaskPlan, got Tensor"),
        ((q, k, v), {"causal": "no"}, "causal must be True or False, got 'no'"),
        ((q, k, v), {"softmax_scale": [1]}, r"finite number .*got \[1\]"),
        ((q, k, v), {"softmax_scale": 10**400}, "finite number"),
        ((q, k, v), {"softmax_scale": -1e31}, "got -1e\\+31"),
        ((q, k, v), {"window_size": True}, "whole number"),
        ((q, k, v, [[1]]), {"causal": True}, "startend_row_indices must be a tensor, got list"),
        ((q, k, v, bounds.numpy()), {"causal": True}, "startend_row_indices must be a tensor, got ndarray"),
        ((q, k, v, bounds), {"window_size": 3}, "two masks"),
        ((q, k, v, bounds.long()), {"causal": True}, "int32"),
        ((q, k, v, bounds), {}, "not defined"),
        ((q, k, v, bounds[:, :, :5]), {"causal": True}, "startend_row_indices must be"),
        ((q.half(), k.half(), v.half()), {"backend": "native"}, "native kernels do not take torch.float16"),
        ((q, k, v), {"backend": "triton"}, "NVIDIA GPU"),
    ]
    for arguments, keywords, message in wrong:
        with pytest.raises(ValueError, match=message):
            flashmask_attention(*arguments, **keywords)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-3, 5), min_size=0, max_size=6),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)
def test_whatever_the_bounds_the_answer_is_right_or_refused(shape, sizes, seed, causal):
    """Random shapes and random, also absurd bounds: a ``ValueError`` or what the dense mask gives."""
    generator = torch.Generator().manual_seed(seed)
    batch, rows, heads, dim = sizes
    q = torch.randn(batch, rows, heads, dim, generator=generator)
    k = torch.randn(batch, max(rows - 1, 0), heads, dim, generator=generator)
    if any(size < 0 for size in shape):
        bounds = torch.randint(
            -100, 100, (batch, 1, k.shape[1], len(shape)), generator=generator, dtype=torch.int32
        )
    else:
        bounds = torch.randint(-100, 100, tuple(shape), generator=generator, dtype=torch.int32)
    if seed % 4 == 0:
        bounds = bounds * 21474836  # to the ends of int32's range
    try:
        out = flashmask_attention(q, k, k, bounds, causal=causal)
    except ValueError:
        return
    plain = flashmask_attention(
        q.double(), k.double(), k.double(), bounds, causal=causal, backend="reference"
    )
    torch.testing.assert_close(out.double(), plain, atol=1e-5, rtol=1e-4)


def test_a_window_wider_than_everything_is_none():
    q, k, v = tensors(1, 12, 12, 1, 1, 8, torch.float64, seed=0)
    for side in (12, 2**31, sys.maxsize):
        torch.testing.assert_close(
            flashmask_attention(q, k, v, window_size=side), flashmask_attention(q, k, v)
        )


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "panels", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["query", "key", "value", "gradient"])
def test_a_broken_number_shows_wherever_it_is_seen_and_nowhere_else(backend, dtype, broken, which):
    """A diverged model must not look healthy; what a row does not see must not reach it, nor its gradients.

    0 times NaN is NaN: a weight of 0 is no mask.
    """
    rows, place = 150, 50
    names = ("query", "key", "value", "gradient")
    inputs = [t.detach() for t in tensors(2, rows, rows, 4, 2, 16, dtype, seed=1)]
    inputs.append(torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2)).to(dtype))
    intervals = mask_case("mixed", rows, rows, 2, seed=1)
    plan = MaskPlan.from_intervals(intervals, rows)
    visible = dense_visibility(intervals, rows).expand(2, 2, -1, -1)

    def run() -> dict[str, torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs[:3]]
        out, lse = flashmask_attention(*leaves, plan=plan, backend=backend, return_softmax_lse=True)
        grads = torch.autograd.grad(out, leaves, inputs[3])
        return dict(zip(("out", "lse", *names), (out.detach(), lse.transpose(1, 2)[..., None], *grads)))

    whole = run()
    inputs[names.index(which)][0, place, 0, 3] = broken
    # Key head 0 serves query heads 0 and 1.
    hit_rows, hit_columns = (
        torch.zeros(2, rows, 4, dtype=torch.bool),
        torch.zeros(2, rows, 2, dtype=torch.bool),
    )
    if which in ("key", "value"):
        hit_rows[0, :, :2] = visible[0, 0, :, place, None]
    else:
        hit_rows[0, place, 0] = visible[0, 0, place].any()
    hit_columns[0, :, 0] = visible[0, 0, hit_rows[0, :, 0]].any(0)
    hit = {"out": hit_rows, "lse": hit_rows, "query": hit_rows, "key": hit_columns, "value": hit_columns}
    assert 0 < hit_rows.sum() < rows * 2 and 0 < hit_columns.sum() < rows
    for name, found in run().items():
        healthy = ~hit[name] if name != which else ~hit[name] & (torch.arange(rows) != place)[:, None]
        torch.testing.assert_close(
            found[healthy], whole[name][healthy], atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2
        )
    # An infinite score may hide a key from a row as well as choose it, so only NaN must show everywhere.
    if broken != broken:
        assert not run()["query"][hit_rows].isfinite().any()
        if which != "gradient":
            assert not run()["out"][hit_rows].isfinite().all(-1).any()


@needs_native
def test_a_row_that_sees_nothing_gives_0_whatever_is_hidden_from_it():
    rows = 70
    intervals = torch.zeros(1, 1, rows, 1, 2, dtype=torch.int32)
    intervals[..., 1] = 10  # nobody among the first ten rows sees anything
    plan = MaskPlan.from_intervals(intervals, rows)
    query, key, value = (torch.full((1, rows, 1, 8), float("nan")) for _ in range(3))
    for backend in ("native", "panels", "reference"):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        out, lse = flashmask_attention(*leaves, plan=plan, backend=backend, return_softmax_lse=True)
        (grad,) = torch.autograd.grad(out, leaves[:1], torch.full_like(out, float("nan")))
        assert bool(
            (out[:, :10] == 0).all() and (lse[..., :10] == -torch.inf).all() and (grad[:, :10] == 0).all()
        )
        assert not bool(out[:, 10:].isfinite().any() or grad[:, 10:].isfinite().any())


@needs_native
@pytest.mark.parametrize("scale", [1e9, 1e18])
def test_huge_scores_choose_the_largest(scale):
    q, k, v = (t.detach() for t in tensors(1, 60, 60, 1, 1, 16, torch.float32, seed=5))
    out = flashmask_attention(q * scale, k * scale, v, causal=True, backend="native")
    exact = flashmask_attention(*(t.double() for t in (q * scale, k * scale, v)), causal=True)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=0)


@needs_native
def test_threads_may_share_a_fresh_plan():
    inputs = [t.detach() for t in tensors(1, 600, 600, 2, 2, 16, torch.float32, seed=2)]
    intervals = mask_case("causal_document", 600, 600, 2)
    plain = flashmask_attention(*inputs, plan=MaskPlan.from_intervals(intervals, 600), backend="native")
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            plan = MaskPlan.from_intervals(intervals, 600)
            made = pool.map(
                lambda _, plan=plan: flashmask_attention(*inputs, plan=plan, backend="native"), range(8)
            )
            assert all(torch.equal(out, plain) for out in made)


@needs_native
def test_a_plan_of_an_evaluation_serves_training():
    inputs = tensors(1, 30, 30, 1, 1, 8, torch.float32, seed=3)
    with torch.inference_mode():
        plan = MaskPlan.cached(mask_case("causal", 30, 30, 1) + 0, 30)
        flashmask_attention(*(t.detach() for t in inputs), plan=plan)
    flashmask_attention(*inputs, plan=plan).sum().backward()
