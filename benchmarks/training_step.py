"""How fast a training step is, against the matrix products it is made of and against other implementations.

Usage: python benchmarks/training_step.py [--quick] [--threads N] [--rounds N] [--widths 256 768]
       python benchmarks/training_step.py --profile [--widths 256 768]

Two parts. The `mini` network on packed multimodal rows of 4096 positions, against the same step under a dense
mask: `vs_dense_mask`. Then a text network of width 256 and 768 on rows of 1024, and the same layers on
packed rows of 4096, against transformers' Ernie4.5-MoE with the same weights. A ratio above 1 means that ours
is faster; a step is forward, backward and fused AdamW. Rows are of the mini corpus, tokenised on the spot.
Losses of all arms are compared first: arms that disagree end the run. `--profile` prints where the time of
our step goes instead. The last line is JSON; null stands for an arm that was not measured, with the reason
under `left_out`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _measure import clock_name, machine, print_json, product, show_machine, show_table, take_turns
from _networks import (
    Twin,
    corpus_rows,
    dense_loss,
    multimodal_config,
    packed_batch,
    packed_loss,
    text_config,
    text_loss,
    text_parameters,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ernie5.backbone.config import BackboneConfig, ElasticConfig, preset
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.trainer import TrainingConfig, parameter_groups
from ernie5.protocol.vocabulary import UnifiedVocabulary

ARMS = ("fp32", "bf16_masters", "bf16_pure")
KEYS = (
    "tokens_per_s",
    "gemm_peak_fraction",
    "vs_transformers",
    "vs_transformers_packed",
    "vs_transformers_eager",
    "vs_dense_mask",
    "vs_naive",
)
# A bf16 product slower than half the fp32 one is emulated: nothing that computes in bf16 can be fast there.
_BF16_WORTH_IT = 0.5
# The first group of which a part is in the operation's name.
_PROFILE_GROUPS = {
    "experts, products included": "swiglu",
    "attention": "flash attention attend",
    "optimizer": "adamw foreach optimizer",
    "GEMM": "aten::mm aten::addmm aten::bmm aten::baddbmm grouped_mm aten::matmul aten::linear",
    "dispatch/gather": "index gather scatter sort topk bincount nonzero embedding dispatch combine cumsum",
    "copies and casts": "copy_ aten::to contiguous clone aten::cat aten::empty fill_ zero",
}


def step_of(
    loss: Callable[[], Tensor], parameters: list[nn.Parameter], dtype: torch.dtype | None = None
) -> Callable[[], None]:
    """A plain step: forward, backward, fused AdamW; ``dtype`` runs the forward pass under autocast."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trainer_step(loss: Callable[[], Tensor], model: Backbone) -> Callable[[], None]:
    """A step as the trainer takes it: its parameter groups, gradient clipping, fused AdamW."""
    training = TrainingConfig()
    optimizer = torch.optim.AdamW(parameter_groups(model, training), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def expect_same(losses: dict[str, Callable[[], Tensor]], tolerance: float) -> None:
    """Print the loss of every arm.

    Raises:
        SystemExit: they differ by more than ``tolerance``, relative.
    """
    with torch.no_grad():
        values = {name: float(loss()) for name, loss in losses.items()}
    print("  losses: " + ", ".join(f"{name} {value:.6f}" for name, value in values.items()), flush=True)
    low, high = min(values.values()), max(values.values())
    if not high - low <= tolerance * abs(high):
        raise SystemExit(f"the arms do not compute the same network: losses from {low} to {high}")


def measure_mini(config: BackboneConfig, rows: int, length: int, rounds: int, threads: int) -> dict[str, Any]:
    """The first part: one trainer step on packed multimodal rows, our mask against a dense one."""
    config = config.model_copy(update={"elastic": ElasticConfig.off()})
    packed = corpus_rows(config, rows, length)
    model = Backbone(config)
    batch = packed_batch(packed, length, config, flat_positions=False)
    ours, dense = partial(packed_loss, model, batch), partial(dense_loss, model, batch)
    seen = batch.plan().dense().float().mean().item()
    print(
        f"\n{config.name}: {rows} rows of {length}, {sum(map(len, packed))} samples, "
        f"{seen:.2%} of the mask visible"
    )
    expect_same({"ours": ours, "dense mask": dense}, 1e-5)
    arms: dict[str, Callable[[], object]] = {
        "ours": trainer_step(ours, model),
        "dense_mask": trainer_step(dense, model),
        "making_the_mask": lambda: batch.plan().dense(),
    }
    measured = take_turns(arms, rounds=rounds, threads=threads)
    seconds = measured.median("ours")
    assert seconds is not None
    return {
        "visible": seen,
        "step_s": seconds,
        "dense_step_s": measured.median("dense_mask"),
        "dense_mask_s": measured.median("making_the_mask"),
        "tokens_per_s": rows * length / seconds,
        "vs_dense_mask": measured.ratio("dense_mask", "ours"),
    }


def model_flops(config: BackboneConfig, rows: int, length: int) -> float:
    """Multiplications and additions of a step on causal text rows; what is recomputed does not count.

    Twice for every weight a token meets, three times for forward and backward; attention only below the
    diagonal.
    """
    width, heads = config.width, config.heads * config.head_dim
    feed = 3 * width * (config.top_k * config.expert_width + config.shared_expert_width)
    projections = width * (2 * heads + 2 * config.key_heads * config.head_dim)
    layer = projections + feed + width * config.experts
    head = width * UnifiedVocabulary(config.text_vocabulary).size
    weights = 6.0 * rows * length * (config.layers * layer + head)
    attention = 3.0 * config.layers * rows * 4 * (length * (length + 1) / 2) * heads
    return weights + attention


def arm_model(width: int, arm: str, *, multimodal: bool) -> Backbone:
    """Our network in the precision of ``arm``; on multimodal rows only the layers are pure bf16."""
    model = Backbone(multimodal_config(width) if multimodal else text_config(width))
    if arm == "bf16_pure":
        (model.layers if multimodal else model).to(torch.bfloat16)
    if arm != "fp32":
        model.compute_dtype = torch.bfloat16
    return model


def measure_text(width: int, arm: str, rows: int, length: int, rounds: int, threads: int) -> dict[str, Any]:
    """Plain causal rows of random ids: ours, transformers with default and with eager experts."""
    model = arm_model(width, arm, multimodal=False)
    ids = torch.randint(0, 4096, (rows, length), generator=torch.Generator().manual_seed(0))
    dtype = torch.float32 if arm == "fp32" else torch.bfloat16
    gemm = product(dtype, threads)
    ours = partial(text_loss, model, ids)
    arms: dict[str, Callable[[], object]] = {"gemm": gemm.call, "ours": step_of(ours, text_parameters(model))}
    left_out: dict[str, str] = {}
    twin = _twin(model, arm, left_out)
    if twin is not None:
        theirs = partial(twin.text_loss, ids)
        autocast = torch.bfloat16 if arm == "bf16_masters" else None
        if arm == "fp32":
            expect_same({"ours": ours, "transformers": theirs}, 1e-4)
        parameters = [p for p in twin.network.parameters() if p.requires_grad]
        default = twin.experts
        step = step_of(theirs, parameters, autocast)
        arms["transformers"] = partial(_with_experts, twin, default, step)
        arms["transformers_eager"] = partial(_with_experts, twin, "eager", step)
    measured = take_turns(arms, rounds=rounds, threads=threads)
    seconds = measured.median("ours")
    assert seconds is not None
    peak = [
        model_flops(model.config, rows, length) / own / (gemm.flops / product_s)
        for own, product_s in zip(measured.seconds["ours"], measured.seconds["gemm"])
    ]
    return {
        "step_s": seconds,
        "tokens_per_s": rows * length / seconds,
        "gemm_gflops": gemm.flops / (measured.median("gemm") or 1) / 1e9,
        "gemm": gemm.name,
        "gemm_peak_fraction": sorted(peak)[len(peak) // 2],
        "vs_transformers": measured.ratio("transformers", "ours"),
        "vs_transformers_eager": measured.ratio("transformers_eager", "ours"),
        "left_out": {**left_out, **measured.left_out},
    }


def measure_packed(
    width: int, arm: str, rows: list[Any], length: int, rounds: int, threads: int
) -> dict[str, Any]:
    """Packed multimodal rows: ours, ours under a dense mask, transformers under its 4-D mask; and the naive
    step, fp32 in every arm: one expert after the other in a Python loop, dense mask."""
    model = arm_model(width, arm, multimodal=True)
    config = model.config
    batch = packed_batch(rows, length, config, flat_positions=True)
    ours, dense = partial(packed_loss, model, batch), partial(dense_loss, model, batch)
    own = list(model.parameters())
    arms: dict[str, Callable[[], object]] = {"ours": step_of(ours, own), "dense_mask": step_of(dense, own)}
    left_out: dict[str, str] = {}
    twin = _twin(model, arm, left_out)
    if twin is not None:
        theirs = partial(twin.packed_loss, batch)
        if arm == "fp32":
            expect_same({"ours": ours, "dense mask": dense, "transformers": theirs}, 1e-4)
        autocast = torch.bfloat16 if arm == "bf16_masters" else None
        step = step_of(theirs, twin.packed_parameters(), autocast)
        arms["transformers"] = partial(_with_experts, twin, twin.experts, step)
        naive, naive_step = twin, step
        if arm != "fp32":
            naive = Twin(arm_model(width, "fp32", multimodal=True))
            naive_step = step_of(partial(naive.packed_loss, batch), naive.packed_parameters())
        arms["naive"] = partial(_with_experts, naive, "eager", naive_step)
    measured = take_turns(arms, rounds=rounds, threads=threads)
    return {
        "packed_step_s": measured.median("ours"),
        "vs_transformers_packed": measured.ratio("transformers", "ours"),
        "vs_dense_mask": measured.ratio("dense_mask", "ours"),
        "vs_naive": measured.ratio("naive", "ours"),
        "left_out": {**left_out, **measured.left_out},
    }


def _twin(model: Backbone, arm: str, left_out: dict[str, str]) -> Twin | None:
    try:
        twin = Twin(model)
    except ImportError as error:
        left_out["transformers"] = f"not installed ({error}); pip install 'ernie-multi[bench]'"
        print(f"  transformers: left out, {left_out['transformers']}")
        return None
    if arm == "bf16_pure":
        twin.network.to(torch.bfloat16)
    return twin


def _with_experts(twin: Twin, implementation: str, step: Callable[[], None]) -> None:
    twin.experts = implementation
    step()


def why_not(arm: str, threads: int, always: bool) -> str | None:
    """The reason to leave ``arm`` out on this machine, or None."""
    if arm == "fp32" or always:
        return None
    rate = {}
    for dtype in (torch.float32, torch.bfloat16):
        gemm = product(dtype, threads, bound_s=0.5)
        measured = take_turns({"gemm": gemm.call}, rounds=3, threads=threads).median("gemm")
        assert measured is not None
        rate[dtype] = gemm.flops / measured / 1e9
    if rate[torch.bfloat16] >= _BF16_WORTH_IT * rate[torch.float32]:
        return None
    return (
        f"bf16 products run at {rate[torch.bfloat16]:.1f} GFLOP/s here, fp32 ones at "
        f"{rate[torch.float32]:.0f}: this CPU has no bf16 arithmetic"
    )


def profile_step(width: int, rows: int, length: int, packed_length: int, threads: int) -> None:
    """Print where our step's time goes, on causal and on packed rows: groups and the longest operations."""
    model = Backbone(text_config(width))
    ids = torch.randint(0, 4096, (rows, length), generator=torch.Generator().manual_seed(0))
    print(f"\nwidth {width}: {rows} causal rows of {length}, fp32")
    flops = model_flops(model.config, rows, length)
    _profile(step_of(partial(text_loss, model, ids), text_parameters(model)), threads, flops)
    config = multimodal_config(width)
    packed = packed_batch(corpus_rows(config, 1, packed_length), packed_length, config, flat_positions=True)
    multimodal = Backbone(config)
    print(f"\nwidth {width}: 1 packed multimodal row of {packed_length}, fp32")
    step = step_of(partial(packed_loss, multimodal, packed), list(multimodal.parameters()))
    _profile(step, threads)


def _profile(step: Callable[[], None], threads: int, flops: float | None = None) -> None:
    """The profiler sees wall time: on a busy machine read shares, and the step's time from the clock."""
    gemm = product(torch.float32, threads)
    plain = take_turns({"step": step, "gemm": gemm.call}, rounds=3, threads=threads)
    seconds, product_s = plain.median("step"), plain.median("gemm")
    assert seconds is not None and product_s is not None
    print(f"  {gemm.name}: {gemm.flops / product_s / 1e9:.0f} GFLOP/s")
    print(f"  a step takes {seconds:.3f} s ({clock_name(threads)})")
    if flops is not None:
        share = flops / seconds / (gemm.flops / product_s)
        print(f"  its {flops / 1e9:.0f} GFLOP of model run at {share:.2f} of that rate")
    steps = 3
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step()
    events = [event for event in recorded.key_averages() if event.self_cpu_time_total > 0]
    total = sum(event.self_cpu_time_total for event in events)
    groups: dict[str, float] = {}
    for event in events:
        group = _group_of(event.key)
        groups[group] = groups.get(group, 0.0) + event.self_cpu_time_total
    for name, microseconds in sorted(groups.items(), key=lambda item: -item[1]):
        print(f"  {microseconds / total:6.1%}  {name}")
    table = [
        {
            "share": f"{event.self_cpu_time_total / total:.1%}",
            "ms a step": event.self_cpu_time_total / 1e3 / steps,
            "calls a step": event.count / steps,
            "group": _group_of(event.key),
            "operation": event.key[:60],
        }
        for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:18]
    ]
    show_table(table, list(table[0]))


def _group_of(operation: str) -> str:
    name = operation.lower()
    for group, parts in _PROFILE_GROUPS.items():
        if any(part in name for part in parts.split()):
            return group
    return "elementwise and rest"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="width 256 only, two rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=None, help="turns of each arm (default 5, quick 2)")
    parser.add_argument("--widths", type=int, nargs="+", choices=(256, 768), help="of the text network")
    parser.add_argument("--profile", action="store_true", help="print where our step's time goes")
    parser.add_argument(
        "--bf16",
        choices=("auto", "always"),
        default="auto",
        help="bf16 arms: where they can be fast, or always",
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    threads, rounds = options.threads, options.rounds or (2 if options.quick or options.tiny else 5)
    facts = machine(threads)
    show_machine(facts)
    rows_of = {64: 1, 256: 4, 768: 2}
    chosen = (64,) if options.tiny else options.widths or ((256,) if options.quick else (256, 768))
    widths = {width: rows_of[width] for width in chosen}
    length, packed_length = (64, 256) if options.tiny else (1024, 4096)
    if options.profile:
        for width, rows in widths.items():
            profile_step(width, rows, length, packed_length, threads)
        return
    network, rows = ("nano", 1) if options.tiny else ("mini", 2)
    mini = measure_mini(preset(network), rows, packed_length, rounds, threads)
    show_table([mini], list(mini))
    result: dict[str, Any] = {"benchmark": "training_step", "quick": options.quick, "machine": facts}
    result |= {"vs_dense_mask": mini["vs_dense_mask"], network: mini}
    for width, rows in widths.items():
        packed = corpus_rows(multimodal_config(width), 1, packed_length)
        arms: dict[str, Any] = {}
        for arm in ARMS:
            reason = why_not(arm, threads, options.bf16 == "always")
            print(f"\nwidth {width}, {arm}" + (f": left out, {reason}" if reason else ""), flush=True)
            if reason:
                arms[arm] = {**dict.fromkeys(KEYS), "left_out": reason}
                continue
            text = measure_text(width, arm, rows, length, rounds, threads)
            gc.collect()
            both = measure_packed(width, arm, packed, packed_length, rounds, threads)
            gc.collect()
            both["left_out"] = {**text["left_out"], **both["left_out"]}
            arms[arm] = {**dict.fromkeys(KEYS), **text, **both}
            show_table([arms[arm]], ["step_s", "packed_step_s", *KEYS])
        result[f"width_{width}"] = arms
    print_json(result)


if __name__ == "__main__":
    main()
