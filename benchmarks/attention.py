"""FlashMask against FlexAttention and dense attention on this CPU: time, memory, and growth with the mask.

Usage: python benchmarks/attention.py [--quick] [--threads N] [--backend native|panels] [--plot]

One row of 8 heads of 64 under three masks and N of 2048, 8192 and 16384. Ratios are the rival's time over
ours, so above 1 ours is faster:

flex_fp32, flex_bf16         compiled FlexAttention, forward, masks made beforehand on both sides
flex_with_mask_bf16          the same with each side's mask made anew, `create_block_mask` compiled and warm
flex_with_eager_mask_bf16    the same with `create_block_mask` as it is
sdpa_dense_fwdbwd            torch's SDPA under a dense mask, forward and backward, fp32
sdpa_causal_fwdbwd           SDPA with is_causal: no documents and no windows, so more to compute
plan_ms                      our mask from its bounds
gemm_peak_fraction_*         our forward rate over the visible tiles of 128 x 128 (4 x 128 x 128 x D each and
                             head), over torch.mm's, same dtype and threads
bf16_over_fp32_gemm          the bf16 rate over the fp32 product's: some CPUs multiply bf16 a hundred times
                             slower than fp32, so that the fraction of that says nothing
peak_mb, flex_peak_mb        rise of resident memory, mask and forward in fp32, each in its own process;
flex_compiled_peak_mb        the latter with a compiled `create_block_mask`. Either contains the output,
                             `output_mb`

Then 131072 positions forward and backward, and times over length and density. The last line is JSON; null
stands for an arm that took longer than the bound on a call, with the reason under `left_out`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _attention import (
    HEADS,
    MASKS,
    WIDTH,
    Bounds,
    Flex,
    dense_mask,
    document_causal,
    forward_backward,
    forward_flops,
    make_plan,
    ours,
    sdpa,
    sliding,
    tensors,
    visible_tiles,
)
from _measure import (
    Rounds,
    machine,
    median_of,
    peak_mb,
    print_json,
    product,
    resident_peak_mb,
    show_machine,
    show_table,
    take_turns,
    whole_peak_mb,
)

KEYS = (
    "flex_fp32",
    "flex_bf16",
    "flex_with_mask_bf16",
    "flex_with_eager_mask_bf16",
    "sdpa_dense_fwdbwd",
    "sdpa_causal_fwdbwd",
    "plan_ms",
    "gemm_peak_fraction_fp32",
    "gemm_peak_fraction_bf16",
    "bf16_over_fp32_gemm",
    "peak_mb",
    "flex_peak_mb",
    "flex_compiled_peak_mb",
    "output_mb",
)
LONGEST = 131072
PLOT = Path(__file__).parents[1] / "docs" / "pictures" / "attention_scaling.png"
GROWING: dict[str, Callable[[int], Bounds]] = {
    "sliding 512": sliding,
    "documents of 2048": lambda length: document_causal(length, max(length // 2048, 1)),
    "documents of 8192": lambda length: document_causal(length, max(length // 8192, 1)),
    "6 documents": document_causal,
}
Arms = dict[str, Callable[[], object]]


def measure(name: str, length: int, flex: Flex, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one mask and length."""
    bounds = MASKS[name](length)
    plan = make_plan(bounds)
    print(f"\n{name}, N={length}: {visible_tiles(plan)} visible tiles of {(length // 128) ** 2}", flush=True)
    figures: dict[str, Any] = {"left_out": {}, "output_mb": length * HEADS * WIDTH * 4 / 2**20}
    with torch.inference_mode():
        for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            measured, arms_flops = _forward(bounds, label, dtype, flex, options)
            figures |= _forward_figures(measured, label, arms_flops, forward_flops(plan))
            figures["left_out"] |= {f"{arm}_{label}": why for arm, why in measured.left_out.items()}
    measured = _backward(bounds, options)
    figures["sdpa_dense_fwdbwd"] = measured.ratio("dense", "ours")
    figures["sdpa_causal_fwdbwd"] = measured.ratio("causal", "ours")
    figures["ours_fwdbwd_ms"] = _ms(measured.median("ours"))
    figures["left_out"] |= {f"sdpa_{arm}_fwdbwd": why for arm, why in measured.left_out.items()}
    if name == "document_causal" or not options.quick:
        figures["peak_mb"] = peak_mb(ours_peak, name, length, options.threads, options.backend)
        theirs = peak_mb(flex_peak, name, length, options.threads)
        if theirs is not None:
            figures["flex_peak_mb"], figures["flex_compiled_peak_mb"] = theirs
    return {**dict.fromkeys(KEYS), **figures}


def _forward(
    bounds: Bounds, label: str, dtype: torch.dtype, flex: Flex, options: argparse.Namespace
) -> tuple[Rounds, dict[str, float]]:
    """Forward arms of one dtype; also the FLOPs of the matrix products beside them."""
    inputs, plan, backend = tensors(len(bounds[0]), dtype), make_plan(bounds), options.backend
    block_mask = flex.eager_mask(bounds)
    products = {"gemm": product(dtype, options.threads)}
    arms: Arms = {
        "ours": lambda: ours(inputs, plan, backend),
        "flex": lambda: flex(inputs, block_mask),
    }
    if label == "bf16":
        products["gemm_fp32"] = product(torch.float32, options.threads)
        arms |= {
            "plan": lambda: make_plan(bounds),
            "ours_with_plan": lambda: ours(inputs, make_plan(bounds), backend),
            "flex_with_mask": lambda: flex(inputs, flex.compiled_mask(bounds)),
            "flex_with_eager_mask": lambda: flex(inputs, flex.eager_mask(bounds)),
        }
    arms |= {name: chosen.call for name, chosen in products.items()}
    measured = take_turns(arms, rounds=options.rounds, threads=options.threads, bound_s=options.bound)
    print(
        "  "
        + ", ".join(
            f"{chosen.name}: {_rate(chosen.flops, measured.median(name))}"
            for name, chosen in products.items()
        )
    )
    return measured, {name: chosen.flops for name, chosen in products.items()}


def _forward_figures(
    measured: Rounds, label: str, products: dict[str, float], flops: float
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        f"flex_{label}": measured.ratio("flex", "ours"),
        f"gemm_peak_fraction_{label}": _share(measured, "gemm", products["gemm"], flops),
        f"ours_{label}_ms": _ms(measured.median("ours")),
    }
    if label == "bf16":
        figures |= {
            "flex_with_mask_bf16": measured.ratio("flex_with_mask", "ours_with_plan"),
            "flex_with_eager_mask_bf16": measured.ratio("flex_with_eager_mask", "ours_with_plan"),
            "plan_ms": _ms(measured.median("plan")),
            "bf16_over_fp32_gemm": _share(measured, "gemm_fp32", products["gemm_fp32"], flops),
        }
    return figures


def _backward(bounds: Bounds, options: argparse.Namespace) -> Rounds:
    length, threads = len(bounds[0]), options.threads
    inputs, plan = tensors(length, torch.float32, grad=True), make_plan(bounds)
    gradient = torch.randn_like(inputs[0])
    mask = dense_mask(bounds)
    arms: Arms = {
        "ours": lambda: forward_backward(lambda x: ours(x, plan, options.backend), inputs, gradient),
        "dense": lambda: forward_backward(lambda x: sdpa(x, mask), inputs, gradient),
        "causal": lambda: forward_backward(lambda x: sdpa(x, None), inputs, gradient),
    }
    rounds = options.rounds if length < 8192 else min(2 if length == 8192 else 1, options.rounds)
    return take_turns(arms, rounds=rounds, threads=threads, bound_s=options.bound, warm_up=length < 8192)


def _share(measured: Rounds, gemm: str, gemm_flops: float, flops: float) -> float | None:
    """Our rate over the product's, median of the rounds."""
    ratio = measured.ratio(gemm, "ours")
    return None if ratio is None else ratio * flops / gemm_flops


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _rate(flops: float, seconds: float | None) -> str:
    return "–" if seconds is None else f"{flops / seconds / 1e9:.3g} GFLOP/s"


def ours_peak(name: str, length: int, threads: int, backend: str | None) -> float:
    """In a process of its own: what a new row's mask and forward pass add to the resident memory."""
    torch.set_num_threads(threads)
    bounds, inputs = MASKS[name](length), tensors(length, torch.float32)
    with torch.inference_mode():
        ours(inputs, make_plan(bounds), backend)
        return resident_peak_mb(lambda: ours(inputs, make_plan(bounds), backend))


def flex_peak(name: str, length: int, threads: int) -> tuple[float, float]:
    """The same for FlexAttention, compiled before: `create_block_mask` as it is, and compiled."""
    torch.set_num_threads(threads)
    bounds, inputs, flex = MASKS[name](length), tensors(length, torch.float32), Flex()
    with torch.inference_mode():
        flex(inputs, flex.compiled_mask(bounds))
        compiled = resident_peak_mb(lambda: flex(inputs, flex.compiled_mask(bounds)))
        flex.eager_mask(bounds)
        return resident_peak_mb(lambda: flex(inputs, flex.eager_mask(bounds))), compiled


def long_row(shape: str, length: int, threads: int, backend: str | None) -> float:
    """In a process of its own: MiB of the whole process after a row's mask, forward and backward pass."""
    torch.set_num_threads(threads)
    row_pass(GROWING[shape](length), backend)()
    return whole_peak_mb()


def row_pass(bounds: Bounds, backend: str | None) -> Callable[[], object]:
    """Mask, forward and backward of one row, fp32."""
    inputs = tensors(len(bounds[0]), torch.float32, grad=True)
    gradient = torch.ones_like(inputs[0])
    return lambda: forward_backward(lambda x: ours(x, make_plan(bounds), backend), inputs, gradient)


def measure_growth(options: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward up to the longest row: windows, documents of a few lengths, growing documents.

    Were time to grow with anything but the visible area, microseconds a visible tile and head would not stay
    the same. Memory is that of the longest rows, each in a process of its own.
    """
    longest = 512 if options.tiny else LONGEST // 8 if options.quick else LONGEST
    points: list[dict[str, Any]] = []
    print(f"\nforward and backward of {HEADS} heads, fp32", flush=True)
    for shape, bounds_of in GROWING.items():
        for length in (longest // 8, longest // 4, longest // 2, longest):
            if shape == "6 documents" and length > longest // 2:
                continue  # quadratic in the length; the other shapes show the longest row
            if shape == "documents of 8192" and length < 8192 * 2:
                continue  # a single document: the shape is no other than the one above
            bounds = bounds_of(length)
            tiles = visible_tiles(make_plan(bounds))
            step = row_pass(bounds, options.backend)
            taken = take_turns({"ours": step}, rounds=1, threads=options.threads, warm_up=length <= 4096)
            seconds = taken.median("ours")
            assert seconds is not None, taken.left_out
            points.append(
                {
                    "mask": shape,
                    "length": length,
                    "visible_tiles": tiles,
                    "density": tiles / (length / 128) ** 2,
                    "seconds": seconds,
                    "us_per_tile_head": 1e6 * seconds / tiles / HEADS,
                }
            )
    show_table(points, list(points[0]))
    per_tile = [point["us_per_tile_head"] for point in points]
    memory = {
        shape: peak_mb(long_row, shape, longest, options.threads, options.backend)
        for shape in ("sliding 512", "documents of 2048")
    }
    for shape, peak in memory.items():
        print(
            f"  {longest} positions, {shape}: the process takes {peak or 0:.0f} MiB at its highest",
            flush=True,
        )
    return {
        "heads": HEADS,
        "longest": longest,
        "longest_peak_mb": max((peak for peak in memory.values() if peak is not None), default=None),
        "us_per_tile_head_spread": max(per_tile) / min(per_tile),
        "points": points,
    }


def plot(growth: dict[str, Any], path: Path) -> None:
    """Time over length, where masks differ, and over visible area, where they must not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    points = growth["points"]
    for mask in dict.fromkeys(point["mask"] for point in points):
        own = [point for point in points if point["mask"] == mask]
        seconds = [point["seconds"] for point in own]
        axes[0].plot([point["length"] for point in own], seconds, "o-", label=mask)
        axes[1].plot([point["visible_tiles"] for point in own], seconds, "o-", label=mask)
    for axis, label in zip(axes, ("positions in the row", "visible tiles of 128 x 128")):
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds, forward and backward")
    figure.suptitle(f"{growth['heads']} heads of {WIDTH}, fp32")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


def summary(results: dict[str, dict[str, Any]], growth: dict[str, Any]) -> dict[str, Any]:
    """The bars of the benchmark: medians over masks (and, where a length is not named, over lengths)."""

    def median(key: str, least: int = 0, only: int | None = None) -> float | None:
        chosen = [
            figures[key]
            for lengths in results.values()
            for length, figures in lengths.items()
            if int(length) >= least and only in (None, int(length))
        ]
        return median_of(chosen)

    def saved(rival: str) -> float | None:
        chosen = [figures for lengths in results.values() for figures in lengths.values()]
        return median_of([1 - f["peak_mb"] / f[rival] for f in chosen if f["peak_mb"] and f[rival]])

    return {
        "flex_fp32": median("flex_fp32"),
        "flex_bf16": median("flex_bf16"),
        "flex_with_mask_bf16_from_8192": median("flex_with_mask_bf16", least=8192),
        "flex_with_eager_mask_bf16_from_8192": median("flex_with_eager_mask_bf16", least=8192),
        "sdpa_dense_fwdbwd_8192": median("sdpa_dense_fwdbwd", only=8192),
        "gemm_peak_fraction_fp32_8192": median("gemm_peak_fraction_fp32", only=8192),
        "gemm_peak_fraction_bf16_8192": median("gemm_peak_fraction_bf16", only=8192),
        "bf16_over_fp32_gemm_8192": median("bf16_over_fp32_gemm", only=8192),
        "memory_saved": saved("flex_peak_mb"),
        "memory_saved_compiled": saved("flex_compiled_peak_mb"),
        "longest_peak_mb": growth["longest_peak_mb"],
        "us_per_tile_head_spread": growth["us_per_tile_head_spread"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="N=2048 only, memory of one mask, growth up to 16384"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm")
    parser.add_argument(
        "--bound", type=float, default=90.0, help="seconds a call may take; slower arms are left out"
    )
    parser.add_argument("--backend", default=None, help="of FlashMask; by default the best there is")
    parser.add_argument("--plot", action="store_true", help=f"write docs/pictures/{PLOT.name}")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = machine(options.threads)
    show_machine(facts)
    lengths = (256,) if options.tiny else (2048,) if options.quick else (2048, 8192, 16384)
    flex = Flex()
    names = list(MASKS)[:1] if options.tiny else list(MASKS)
    results: dict[str, dict[str, Any]] = {name: {} for name in names}
    for length in lengths:
        for name in names:
            results[name][str(length)] = measure(name, length, flex, options)
            show_table([results[name][str(length)]], list(KEYS))
    growth = measure_growth(options)
    if options.plot:
        plot(growth, PLOT)
    bars = summary(results, growth)
    print("\nmedians over masks")
    for key, value in bars.items():
        print(f"  {key:38} {'–' if value is None else f'{value:.3g}'}")
    print_json(
        {
            "benchmark": "attention",
            "quick": options.quick,
            "machine": facts,
            "backend": options.backend or "auto",
            "heads": HEADS,
            "width": WIDTH,
            **results,
            "growth": growth,
            "bars": bars,
        }
    )


if __name__ == "__main__":
    main()
