"""The conformance matrix of attention backends: masks x head dims x lengths x heads, against float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from ernie5.kernels.flashmask import MaskPlan, flashmask_attention
from tests.kernels.flashmask_cases import MASKS, dense_visibility, mask_case, oracle_attention

HEAD_DIMS = (32, 64, 80, 128, 192, 256)
LENGTHS = (
    (1, 1),
    (31, 31),
    (127, 127),
    (128, 128),
    (1024, 1024),
    (1, 128),
    (127, 128),
    (128, 31),
    (96, 1024),
)
HEADS = ((1, 1), (4, 1), (4, 4))
LONG = (4097, 4097)


@dataclass(frozen=True)
class Case:
    mask: str
    head_dim: int
    rows: int
    columns: int
    heads: tuple[int, int]
    seed: int

    def __str__(self) -> str:
        return f"{self.mask}-D{self.head_dim}-{self.rows}x{self.columns}-H{self.heads[0]}.{self.heads[1]}"


def _sample(count: int) -> list[Case]:
    """A seeded sample that has every mask with each head dim at least nearly once, small lengths mostly."""
    draw = random.Random(20)
    cases = []
    for mask in MASKS:
        dims = draw.sample(HEAD_DIMS, count)
        for dim in dims:
            rows, columns = draw.choice(LENGTHS)
            cases.append(Case(mask, dim, rows, columns, draw.choice(HEADS), draw.randrange(1 << 16)))
    return cases


CASES = _sample(5)


def matrix_cases(mask: str, head_dim: int) -> list[Case]:
    """Every length and head count of one mask and head dim; the longest rows with two of the dims only."""
    cases = [
        Case(mask, head_dim, *length, heads, seed) for length in LENGTHS for seed, heads in enumerate(HEADS)
    ]
    return cases + ([Case(mask, head_dim, *LONG, (1, 1), 5)] if head_dim in (64, 80) else [])


def tensors(
    batch: int, rows: int, columns: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int, h: int) -> torch.Tensor:
        return torch.randn(batch, n, h, dim, generator=generator).to(dtype).requires_grad_()

    return draw(rows, heads), draw(columns, key_heads), draw(columns, key_heads)


def check(case: Case, dtype: torch.dtype, backend: str) -> None:
    """fp32 within 1e-5 of float64 forward and 1e-4 backward (relative to 1 + the gradient's scale); other
    dtypes within twice the error of attention done naively in that dtype."""
    heads, key_heads = case.heads
    batch = 2 if case.rows <= 128 else 1
    inputs = tensors(batch, case.rows, case.columns, heads, key_heads, case.head_dim, dtype, case.seed)
    intervals = mask_case(case.mask, case.rows, case.columns, key_heads, case.seed)
    plan = MaskPlan.from_intervals(intervals, case.rows)
    out, lse = flashmask_attention(*inputs, plan=plan, backend=backend, return_softmax_lse=True)
    generator = torch.Generator().manual_seed(case.seed + 1)
    cotangent = torch.randn(out.shape, generator=generator).to(dtype)
    results = (out, *torch.autograd.grad(out, inputs, cotangent))

    visible = dense_visibility(intervals, case.rows)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    true_out, true_lse = oracle_attention(*exact, visible)
    truths = (true_out, *torch.autograd.grad(true_out, exact, cotangent.double()))
    seen = torch.isfinite(true_lse)
    assert torch.equal(torch.isfinite(lse), seen) and bool((lse[~seen] == -torch.inf).all())
    assert (lse[seen].double() - true_lse[seen]).abs().max() < (1e-5 if dtype == torch.float32 else 1e-4) * 10
    assert bool((out.transpose(1, 2)[~seen] == 0).all())
    naive = None if dtype == torch.float32 else _naive(inputs, visible, cotangent)
    for index, (ours, true) in enumerate(zip(results, truths)):
        error = (ours.double() - true).abs().max().item()
        if naive is None:
            bound = 1e-5 if index == 0 else 1e-4
        else:
            bound = 2 * (naive[index].double() - true).abs().max().item() + 1e-3
        assert error <= bound, (
            f"{case}: {('out', 'dq', 'dk', 'dv')[index]} is off by {error:.3g} > {bound:.3g}"
        )


def _naive(
    inputs: tuple[torch.Tensor, ...], visible: torch.Tensor, cotangent: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Attention in the inputs' precision: every intermediate is rounded to it."""
    dtype = inputs[0].dtype

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).float()

    leaves = [t.detach().float().requires_grad_() for t in inputs]
    query, key, value = leaves
    groups = query.shape[2] // key.shape[2]
    key, value = (t.repeat_interleave(groups, 2) for t in (key, value))
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(groups, 1)
    scores = rounded(torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[-1] ** -0.5)
    seen = visible.any(-1, keepdim=True)
    weights = rounded(scores.masked_fill(~visible, -torch.inf).masked_fill(~seen, 0.0).softmax(-1))
    weights = torch.where(visible, weights, 0.0)
    out = rounded(torch.einsum("bhij,bjhd->bihd", weights, value))
    grads = torch.autograd.grad(out, leaves, cotangent.float())
    return (out.detach(), *(rounded(grad) for grad in grads))
