"""Measures the tile sizes of the Triton kernels on the GPU at hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from ernie5.kernels.flashmask.plan import MaskPlan
from ernie5.kernels.flashmask.triton_backend import triton_backward, triton_forward
from ernie5.kernels.flashmask.triton_configs import ConfigKey, TileConfig, candidates, choose, config_key


def tune(
    query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, softmax_scale: float
) -> dict[str, list[tuple[TileConfig, float]]]:
    """Times every configuration for these tensors and takes the fastest from now on in this process.

    The choice holds for tensors of this head dim and type and masks of as many intervals. Timings differ
    from run to run, and other tiles sum in another order: a run that must repeat bit for bit keeps the
    defaults.

    Returns:
        For each kernel its configurations and milliseconds, the fastest first. ``dkdv`` and ``dq`` are timed
        as the whole backward pass, the other kernel held fixed.
    """
    out, lse, lost = triton_forward(query, key, value, plan, softmax_scale, keep_lost=True)
    grad_out = torch.randn_like(out)
    intervals = plan.intervals.shape[3]

    def forward() -> None:
        triton_forward(query, key, value, plan, softmax_scale)

    def backward() -> None:
        triton_backward(grad_out, query, key, value, out, lost, lse, plan, softmax_scale)

    return {
        "forward": _fastest(config_key("forward", query, intervals), forward),
        "dkdv": _fastest(config_key("dkdv", query, intervals), backward),
        "dq": _fastest(config_key("dq", query, intervals), backward),
    }


def _fastest(key: ConfigKey, run: Callable[[], None]) -> list[tuple[TileConfig, float]]:
    timed = []
    for config in candidates(key):
        choose(key, config)
        try:
            timed.append((config, float(do_bench(run, warmup=10, rep=50, return_mode="median"))))
        except OutOfResources:
            continue
    timed.sort(key=lambda pair: pair[1])
    choose(key, timed[0][0] if timed else None)
    return timed
