"""FlashMask's Triton kernels on a GPU: right first, then timed against FlexAttention and flash-attention.

Usage: benchmarks/gpu.sh [--minutes M] [--length N] [--out FOLDER]

1. Twelve masks x head dims 64 and 128 x bf16 and fp16, forward and backward, against a dense fp32 reference:
   an error of at most twice that of the dense computation in the same type passes.
2. The tile sizes are measured and the fastest taken; the table names them.
3. Forward and backward of all masks at 8192 tokens a row, against compiled FlexAttention with its mask built
   beforehand, and flash-attention where it is installed and can express the mask.
4. Rows of 131072 tokens with each side's mask construction counted.
5. A training step of the `mini` backbone, where it can be moved to the GPU.

A ratio above 1 means that ours is faster. What the time does not suffice for is left out and named. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from _gpu_masks import GpuMask, document_lengths, gpu_masks
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels.flashmask import MaskPlan, flashmask_attention

_DEVICE = "cuda"
_HEADS, _KEY_HEADS = 32, 8
_CHECKED_LENGTH = 1000
_TILE = 128
_LONG = 131072
_LONG_MASKS = ("causal", "sliding_window", "causal_document", "document")


class Budget:
    """Minutes for everything; what comes too late is listed, not run."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    def allows(self, what: str, seconds: float) -> bool:
        if time.monotonic() + seconds <= self._end:
            return True
        self.left_out.append(f"{what}: no time left")
        return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=7.0, help="for everything (default 7)")
    parser.add_argument("--length", type=int, default=8192, help="tokens a row in part 3 (default 8192)")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of all rows in part 3")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return 2
    budget = Budget(options.minutes)
    report: dict[str, Any] = {"machine": machine()}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    report["check"] = check_all(say, budget)
    report["tiles"] = tune_all(say, options.length, budget)
    batch = max(1, options.tokens // options.length)
    report["masks"] = {}
    for width in (128, 64):
        report["masks"][f"d{width}"] = time_masks(say, budget, options.length, batch, width)
        if width == 128:
            report["with_mask"] = time_with_mask(say, budget)
    report["training_step"] = training_step(say, budget)
    report["left_out"] = budget.left_out
    report["summary"] = summary(report)
    for line in budget.left_out:
        say(f"left out: {line}")
    (options.out / "gpu_attention.txt").write_text("\n".join(lines) + "\n")
    text = json.dumps(report)
    (options.out / "gpu_attention.json").write_text(text + "\n")
    print(text)
    return 0 if not report["check"]["failed"] else 1


def machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "flash_attn"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "-"
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30),
        **versions,
    }


# ---- 1: correctness


def dense(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Attention by definition in the inputs' dtype; ``visible`` is bool ``[1, 1 or Hk, Nq, Nk]``."""
    group = query.shape[2] // key.shape[2]
    q, k, v = query.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(group, 1) for t in (key, value))
    visible = visible.repeat_interleave(group, 1) if visible.shape[1] > 1 else visible
    scores = (q @ k.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~visible, -math.inf)
    seen = visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen, 0.0)
    return (weights @ v).transpose(1, 2)


def check(mask: GpuMask, length: int, width: int, dtype: torch.dtype) -> dict[str, float]:
    """Per tensor, our greatest error over twice that of the dense computation in the same type."""
    generator = torch.Generator(_DEVICE).manual_seed(0)
    inputs = [
        torch.randn(1, length, heads, width, generator=generator, device=_DEVICE, dtype=dtype)
        for heads in (4, 2, 2, 4)
    ]
    *leaves, grad_out = inputs
    plan = MaskPlan.from_intervals(mask.intervals().to(_DEVICE), length)
    visible = plan.dense()

    def results(run: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        given = [t.detach().to(kind).requires_grad_() for t in leaves]
        out = run(*given)
        return [t.float() for t in (out, *torch.autograd.grad(out, given, grad_out.to(kind)))]

    right = results(lambda *qkv: dense(*qkv, visible), torch.float32)
    naive = results(lambda *qkv: dense(*qkv, visible), dtype)
    ours = results(lambda *qkv: flashmask_attention(*qkv, plan=plan, backend="triton"), dtype)
    ratios = {}
    for name, got, plain, want in zip(("out", "dq", "dk", "dv"), ours, naive, right):
        allowed = 2 * float((plain - want).abs().max()) + 1e-5
        error = float((got - want).abs().max()) if bool(got.isfinite().all()) else math.inf
        ratios[name] = error / allowed
    return ratios


def check_all(say: Callable[[str], None], budget: Budget) -> dict[str, Any]:
    worst, failed, run = 0.0, [], 0
    for width in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            for mask in gpu_masks(_CHECKED_LENGTH, 2, 2, _DEVICE):
                name = f"{mask.name} D={width} {str(dtype).removeprefix('torch.')}"
                if not budget.allows(f"check {name}", 5):
                    continue
                ratios = check(mask, _CHECKED_LENGTH, width, dtype)
                run += 1
                worst = max(worst, *ratios.values())
                if max(ratios.values()) > 1:
                    failed.append(f"{name}: {ratios}")
                    say(f"WRONG {failed[-1]}")
    say(f"check: {run - len(failed)} of {run} within twice the naive error (worst share {worst:.2f})")
    return {"run": run, "failed": failed, "worst": worst}


# ---- 2: tile sizes


def make_inputs(batch: int, length: int, width: int, heads: int, key_heads: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output, bf16 ``[B, N, heads, D]``."""
    return [
        torch.randn(batch, length, count, width, device=_DEVICE, dtype=torch.bfloat16)
        for count in (heads, key_heads, key_heads, heads)
    ]


def tune_all(say: Callable[[str], None], length: int, budget: Budget) -> dict[str, Any]:
    from ernie5.kernels.flashmask.triton_tuning import tune

    found: dict[str, Any] = {}
    for width in (128, 64):
        if not budget.allows(f"tile sizes D={width}", 40):
            continue
        query, key, value, _ = make_inputs(1, length, width, _HEADS, _KEY_HEADS)
        mask = next(m for m in gpu_masks(length, _KEY_HEADS, 1, _DEVICE) if m.name == "causal_document")
        plan = MaskPlan.from_intervals(mask.intervals().to(_DEVICE), length)
        for kernel, timed in tune(query, key, value, plan, width**-0.5).items():
            found[f"{kernel} d{width}"] = [[*config, round(ms, 4)] for config, ms in timed]
            listed = ", ".join(f"{'x'.join(map(str, config))} {ms:.3f} ms" for config, ms in timed)
            say(f"tiles of {kernel} D={width} (rows x columns x warps x stages): {listed}")
    return found


# ---- 3: against FlexAttention and flash-attention


def milliseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=20, rep=80, return_mode="median"))


def both_ways(forward: Callable[..., Tensor], leaves: list[Tensor], grad_out: Tensor) -> tuple[float, float]:
    """Milliseconds of the forward pass, which keeps what the other needs, and of the backward pass."""
    given = [t.detach().requires_grad_() for t in leaves]
    ahead = milliseconds(lambda: forward(*given))
    out = forward(*given)
    return ahead, milliseconds(lambda: torch.autograd.grad(out, given, grad_out, retain_graph=True))


def flex_block_mask(mask: GpuMask, heads: int, length: int, compiled: bool = False) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if mask.predicate is None:
        return None
    per_head = heads if mask.name == "random_eviction" else None
    return create_block_mask(
        mask.predicate, None, per_head, length, length, device=_DEVICE, _compile=compiled
    )


def flex_function() -> Callable[..., Tensor]:
    """Compiled FlexAttention of (query, key, value, block mask) in its own layout, ``[B, H, N, D]``."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v, mask: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def flash_function(mask: GpuMask, batch: int, length: int) -> Callable[..., Tensor] | None:
    """flash-attention for the masks that it can express; None for the others or where it is not installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    if mask.name in ("full", "causal"):
        return lambda q, k, v: flash_attn_func(q, k, v, causal=mask.name == "causal")
    if mask.name not in ("document", "causal_document"):
        return None
    sizes = document_lengths(length) * batch
    bounds = torch.tensor([0, *sizes], device=_DEVICE).cumsum(0).int()

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        longest = max(sizes)
        causal = mask.name == "causal_document"
        out = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=causal)
        return out.unflatten(0, (batch, length))

    return packed


def visible_share(plan: MaskPlan) -> float:
    """Share of the tiles of 128 x 128 that are visible; what the published rates count."""
    tiles = plan.row_tiles(_TILE, _TILE)
    return len(tiles.entries) / (plan.batch * plan.heads * tiles.strips * -(-plan.columns // _TILE))


def time_masks(
    say: Callable[[str], None], budget: Budget, length: int, batch: int, width: int
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    *leaves, grad_out = make_inputs(batch, length, width, _HEADS, _KEY_HEADS)
    heads_first = [t.transpose(1, 2).contiguous() for t in leaves]
    say(f"\nD={width}, {batch} rows of {length}, {_HEADS} query and {_KEY_HEADS} key heads, bf16")
    ways = "".join(f"{way + ' ms':>9}{'TFLOP/s':>9}{'flex ms':>9}{'ratio':>7}" for way in ("fwd", "bwd"))
    say(f"{'mask':22}{'tiles':>6}{ways}{'flash fwd, bwd ms':>19}")
    for mask in gpu_masks(length, _KEY_HEADS, _HEADS // _KEY_HEADS, _DEVICE):
        if not budget.allows(f"{mask.name} D={width}", 25):
            continue
        plan = MaskPlan.from_intervals(mask.intervals().to(_DEVICE), length)
        share = visible_share(plan)
        ahead, back = both_ways(
            lambda q, k, v, plan=plan: flashmask_attention(q, k, v, plan=plan, backend="triton"),
            leaves,
            grad_out,
        )
        work = share * 4 * batch * length**2 * _HEADS * width / 1e9  # GFLOP: over ms gives TFLOP/s
        row: dict[str, Any] = {
            "share": share,
            "fwd_ms": ahead,
            "bwd_ms": back,
            "fwd_tflops": work / ahead,
            "bwd_tflops": 2.5 * work / back,
        }
        torch._dynamo.reset()
        flex = partial(flex_function(), mask=flex_block_mask(mask, _HEADS, length))
        row["flex_fwd_ms"], row["flex_bwd_ms"] = both_ways(
            flex, heads_first, grad_out.transpose(1, 2).contiguous()
        )
        row["fwd_ratio"], row["bwd_ratio"] = row["flex_fwd_ms"] / ahead, row["flex_bwd_ms"] / back
        ours = flashmask_attention(*leaves, plan=plan, backend="triton")
        row["disagreement"] = float((flex(*heads_first).transpose(1, 2) - ours).abs().max())
        flash = flash_function(mask, batch, length)
        if flash is not None:
            row["flash_fwd_ms"], row["flash_bwd_ms"] = both_ways(flash, leaves, grad_out)
        found[mask.name] = row
        ways = "".join(
            f"{row[way + '_ms']:9.3f}{row[way + '_tflops']:9.0f}"
            f"{row['flex_' + way + '_ms']:9.3f}{row[way + '_ratio']:7.2f}"
            for way in ("fwd", "bwd")
        )
        flash_text = f"{row['flash_fwd_ms']:.3f}, {row['flash_bwd_ms']:.3f}" if flash is not None else "-"
        say(f"{mask.name:22}{share:6.2f}{ways}{flash_text:>19}")
        if row["disagreement"] > 0.05:
            say(f"  the two outputs differ by {row['disagreement']:.3f}")
    return found


# ---- 4: mask construction counted


def time_with_mask(say: Callable[[str], None], budget: Budget) -> dict[str, dict[str, Any]]:
    """New rows of 131072 tokens: from intervals on the host to the output, against a new block mask's way."""
    heads, key_heads, width = 8, 2, 128
    query, key, value, _ = make_inputs(1, _LONG, width, heads, key_heads)
    heads_first = [t.transpose(1, 2).contiguous() for t in (query, key, value)]
    found: dict[str, dict[str, Any]] = {}
    say(f"\nmask of a new row counted: D={width}, {_LONG} tokens, {heads} query and {key_heads} key heads")
    say(f"{'mask':22}{'ours ms':>10}{'of it plan':>12}{'flex ms':>10}{'of it mask':>12}{'ratio':>8}")
    for mask in gpu_masks(_LONG, key_heads, heads // key_heads, _DEVICE):
        if mask.name not in _LONG_MASKS or not budget.allows(f"{mask.name} at {_LONG}", 40):
            continue

        def plan_of(mask: GpuMask = mask) -> MaskPlan:
            return MaskPlan.from_intervals(mask.intervals().to(_DEVICE), _LONG)

        def ours() -> Tensor:
            return flashmask_attention(query, key, value, plan=plan_of(), backend="triton")

        torch._dynamo.reset()
        attend = flex_function()
        block_mask = flex_block_mask(mask, heads, _LONG, compiled=True)

        def theirs(mask: GpuMask = mask, attend: Callable[..., Tensor] = attend) -> Tensor:
            return attend(*heads_first, flex_block_mask(mask, heads, _LONG, compiled=True))

        prepared = plan_of()
        flashmask_attention(query, key, value, plan=prepared, backend="triton")
        row = {
            "ours_ms": wall(ours),
            "ours_prebuilt_ms": wall(
                lambda plan=prepared: flashmask_attention(query, key, value, plan=plan, backend="triton")
            ),
            "flex_ms": wall(theirs),
            "flex_prebuilt_ms": wall(
                lambda attend=attend, block_mask=block_mask: attend(*heads_first, block_mask)
            ),
        }
        row["ratio"] = row["flex_ms"] / row["ours_ms"]
        found[mask.name] = row
        say(
            f"{mask.name:22}{row['ours_ms']:10.2f}{row['ours_ms'] - row['ours_prebuilt_ms']:12.2f}"
            f"{row['flex_ms']:10.2f}{row['flex_ms'] - row['flex_prebuilt_ms']:12.2f}{row['ratio']:8.2f}"
        )
    return found


def wall(run: Callable[[], object], repeats: int = 7) -> float:
    """Median wall time in ms, the device waited for: host work counts here."""
    times = []
    run()
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


# ---- 5: a training step


def mini_step(device: str, rows: int, length: int) -> Callable[[], None]:
    """Forward, backward and AdamW of the mini network on causal rows of text."""
    from ernie5.backbone.config import preset
    from ernie5.backbone.model.experts import Routing
    from ernie5.backbone.model.transformer import Backbone
    from ernie5.kernels.flashmask import masks

    model = Backbone(preset("mini")).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 200, (rows, length), device=device)
    positions = torch.arange(length, dtype=torch.float32, device=device)[None, :, None].expand(
        rows, length, 3
    )
    plan = MaskPlan.from_intervals(masks.causal(length, length).to(device), length)

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flashmask_attention(query, key, value, plan=plan)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            hidden = model.run(F.embedding(ids, model.embeddings.token), positions, attend, Routing())
            logits = model.text_logits(hidden[:, :-1].flatten(0, 1))
            loss = F.cross_entropy(logits.float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def training_step(
    say: Callable[[str], None], budget: Budget, rows: int = 8, length: int = 1024
) -> dict[str, Any] | None:
    """Milliseconds of one step, or None if the backbone or its packages are not ready for a GPU."""
    if not budget.allows("training step", 20):
        return None
    try:
        took = wall(mini_step(_DEVICE, rows, length))
    except Exception as error:
        # The backbone is developed on CPUs: what keeps it from a GPU is a finding, no failure of this script.
        budget.left_out.append(f"training step: {type(error).__name__}: {str(error)[:300]}")
        return None
    rate = rows * length / took * 1e3
    say(f"\ntraining step, mini, {rows} rows of {length} text tokens: {took:.1f} ms, {rate:.0f} tokens/s")
    return {"ms": took, "tokens_per_s": rate}


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The least and the median ratio to FlexAttention, by head dim and direction."""
    found: dict[str, Any] = {}
    for width, rows in report["masks"].items():
        for way in ("fwd", "bwd"):
            ratios = [row[f"{way}_ratio"] for row in rows.values()]
            if ratios:
                found[f"flex_{way}_{width}"] = {"min": min(ratios), "median": statistics.median(ratios)}
    ratios = [row["ratio"] for row in report["with_mask"].values()]
    if ratios:
        found["flex_with_mask_131072"] = {"min": min(ratios), "median": statistics.median(ratios)}
    return found


if __name__ == "__main__":
    sys.exit(main())
