"""The sparse feed-forward against torch's grouped products and a loop over experts, on this CPU.

Usage: python benchmarks/experts.py [--quick] [--threads N] [--rounds N]

Three shapes: the `mini` preset's, and d=256 and d=768 as in published measurements of such layers. Every arm
gets the same routed tokens and does the whole of it: dispatch, SwiGLU experts, weighted sum, and in the
second half all gradients. Ratios are the rival's time over ours. `gemm_peak_fraction` is ours over the rate
of torch.mm measured beside it, counted on the products alone (2 * rows * 3 d h forward, three times that with
the backward pass); `imbalanced` routes half of all slots to one expert. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _measure import machine, print_json, product, show_machine, show_table, take_turns
from torch import Tensor

from ernie5.kernels import experts_native
from ernie5.kernels.experts import sparse_swiglu

# name: tokens, slots, experts, width, hidden
SHAPES = {
    "mini": (2048, 4, 16, 192, 96),
    "d256": (4096, 4, 16, 256, 256),
    "d768": (2048, 4, 16, 768, 512),
}
QUICK = {"mini": SHAPES["mini"], "d256": (1024, 4, 16, 256, 256)}


def problem(shape: tuple[int, ...], imbalanced: bool) -> tuple[list[Tensor], Tensor]:
    """Leaves (tokens, gate_up, down, weights) and the experts of every slot."""
    tokens, slots, experts, width, hidden = shape
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).requires_grad_()

    scores = torch.rand(tokens, experts, generator=generator)
    if imbalanced:
        scores[: tokens // 2 * 2, 0] = 2.0
    weight = torch.rand(tokens, slots, generator=generator).requires_grad_()
    leaves = [
        random(tokens, width),
        random(experts, 2 * hidden, width),
        random(experts, width, hidden),
        weight,
    ]
    return leaves, scores.topk(slots, -1).indices


def arms(leaves: list[Tensor], expert: Tensor, gradients: bool) -> dict[str, Callable[[], object]]:
    x, gate_up, down, weight = leaves
    cotangent = torch.randn(x.shape)

    def run(backend: str) -> None:
        with torch.set_grad_enabled(gradients):
            out = sparse_swiglu(x, gate_up, down, expert, weight, backend=backend)
        if gradients:
            torch.autograd.grad(out, leaves, cotangent)

    return {name: partial(run, name) for name in ("native", "grouped", "reference")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two small shapes, under a minute")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = machine(options.threads)
    show_machine(facts)
    gemm = product(torch.float32, options.threads)
    figures: dict[str, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    for name, shape in (QUICK if options.quick else SHAPES).items():
        tokens, slots, _, width, hidden = shape
        for imbalanced in (False, True):
            leaves, expert = problem(shape, imbalanced)
            for gradients in (False, True):
                todo = arms(leaves, expert, gradients)
                if not experts_native.supports(leaves[0]):
                    del todo["native"]
                timed = take_turns(
                    {**todo, "gemm": gemm.call},
                    rounds=3 if options.quick else options.rounds,
                    threads=options.threads,
                )
                label = f"{name}{'_imbalanced' if imbalanced else ''}_{'fwdbwd' if gradients else 'fwd'}"
                ours = "native" if "native" in todo else "grouped"
                flops = 2.0 * tokens * slots * 3 * width * hidden * (3 if gradients else 1)
                fraction = statistics.median(
                    flops / mine / (gemm.flops / theirs)
                    for mine, theirs in zip(timed.seconds[ours], timed.seconds["gemm"])
                )
                figures[label] = {
                    "ms": round(1e3 * (timed.median(ours) or 0), 2),
                    "vs_grouped": round(timed.ratio("grouped", ours) or 0, 2),
                    "vs_loop": round(timed.ratio("reference", ours) or 0, 2),
                    "gemm_peak_fraction": round(fraction, 2),
                }
                rows.append({"case": label, **figures[label]})
                print(f"  {label} measured", flush=True)
    show_table(rows, ["case", *next(iter(figures.values()))])

    def middle(key: str, ending: str) -> float:
        plain = {case: known for case, known in figures.items() if "imbalanced" not in case}
        return statistics.median(known[key] for case, known in plain.items() if case.endswith(ending))

    print_json(
        {
            "machine": facts,
            "vs_grouped_fwd": middle("vs_grouped", "_fwd"),
            "vs_grouped_fwdbwd": middle("vs_grouped", "_fwdbwd"),
            "vs_loop_fwdbwd": middle("vs_loop", "_fwdbwd"),
            "gemm_peak_fraction_fwd": middle("gemm_peak_fraction", "_fwd"),
            "gemm_peak_fraction_fwdbwd": middle("gemm_peak_fraction", "_fwdbwd"),
            "cases": figures,
        }
    )


if __name__ == "__main__":
    main()
