"""The Triton kernels without a GPU: interpreted they give the right numbers, compiled they keep to the GPU's
registers and load asynchronously."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ernie5.kernels.flashmask.plan import MaskPlan
from tests.kernels.flashmask_cases import dense_visibility, mask_case

pytest.importorskip("triton", reason="Triton is not installed")

from ernie5.kernels.flashmask import triton_kernels
from ernie5.kernels.flashmask.triton_backend import padded_bounds, split_tiles, triton_forward
from ernie5.kernels.flashmask.triton_compile import CompileReport, compile_kernel
from ernie5.kernels.flashmask.triton_configs import (
    ConfigKey,
    TileConfig,
    candidates,
    choose,
    config_key,
    constants,
    padded_head_dim,
    tile_config,
)

KERNELS = ("forward", "dkdv", "dq")
CAPABILITY = {"sm_80": 80, "sm_86": 86, "sm_90": 90}
SHARED_KIB = {"sm_80": 163, "sm_86": 99, "sm_90": 227}
ROOT = Path(__file__).parents[2]
# The only spills allowed, in bytes a thread, by GPU family, kernel, head dim, type and intervals a column.
# docs/kernels.md tells of each; sm_86 is a family that was only compiled for.
KNOWN_SPILLS: dict[tuple[str, str, int, str, int], int] = {
    ("sm_90", "dkdv", 80, "bf16", 3): 16,
    ("sm_90", "forward", 192, "fp32", 3): 16,
    **{("sm_86", "dq", dim, "bf16", count): 48 for dim in (80, 128, 192, 256) for count in (1, 2, 3)},
    ("sm_86", "dkdv", 64, "fp32", 3): 8,
}


@pytest.mark.timeout(900)
def test_interpreted_kernels_equal_the_oracle():
    """The suite of ``triton_interpreter.py``, which needs a process of its own."""
    options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout=600")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name("triton_interpreter.py"))],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed.group(1)) >= 30 and "skipped" not in done.stdout, done.stdout[-2000:]


def check_compiled(kernel: str, family: str, head_dim: int, config: TileConfig, element: str, intervals: int):
    report = compile_kernel(
        getattr(triton_kernels, f"{kernel}_kernel"),
        constants(kernel, head_dim, config, intervals=intervals, precision="ieee", keep=element != "fp32"),
        capability=CAPABILITY[family],
        element=element,
        warps=config.warps,
        stages=config.stages,
    )
    assert report.spill_bytes <= KNOWN_SPILLS.get((family, kernel, head_dim, element, intervals), 0), report
    assert report.shared_bytes <= SHARED_KIB[family] << 10, report
    if element != "fp32":
        assert report.async_copies > 0, report
        # wgmma works on 64 rows at least.
        rows = config.block_n if kernel == "dkdv" else config.block_m
        assert report.matrix_instruction == ("wgmma" if family == "sm_90" and rows >= 64 else "mma.sync"), (
            report
        )
    return report


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", ["sm_80", "sm_90"])
def test_defaults_compile_well(kernel, head_dim, family):
    config = candidates(ConfigKey(kernel, family, head_dim, 2, 2))[0]
    report = check_compiled(kernel, family, head_dim, config, "bf16", intervals=2)
    assert report.target == {"sm_80": "sm_80", "sm_90": "sm_90a"}[family]


def test_a_spill_that_is_not_listed_fails(monkeypatch):
    """Neither for its kernel, nor beyond what is listed for it."""
    spilling = CompileReport("sm_90a", 255, 16, 1 << 10, 8, "wgmma")
    monkeypatch.setattr(sys.modules[__name__], "compile_kernel", lambda *a, **k: spilling)
    config = TileConfig(64, 128, 8, 2, fold=True)
    check_compiled("dkdv", "sm_90", 80, config, "bf16", 3)
    for kernel, dim, element, intervals in (
        ("dkdv", 128, "bf16", 3),
        ("dq", 80, "bf16", 3),
        ("dkdv", 80, "bf16", 2),
    ):
        with pytest.raises(AssertionError, match="spill_bytes=16"):
            check_compiled(kernel, "sm_90", dim, config, element, intervals)
    spilling = dataclasses.replace(spilling, spill_bytes=24)
    with pytest.raises(AssertionError, match="spill_bytes=24"):
        check_compiled("dkdv", "sm_90", 80, config, "bf16", 3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sizes_of_one_compile(kernel):
    """Triton makes launch arguments that equal 1 compile-time constants."""
    jitted = getattr(triton_kernels, f"{kernel}_kernel")
    ones = {"heads", "group", "mask_batch", "mask_heads", "rows", "columns"} & set(jitted.arg_names)
    report = compile_kernel(
        jitted,
        constants(kernel, 64, TileConfig(32, 64, 4, 2), intervals=1, precision="ieee")
        | dict.fromkeys(ones, 1),
        capability=80,
        stages=2,
    )
    assert report.matrix_instruction == "mma.sync"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("family", ["sm_80", "sm_86", "sm_90"])
def test_every_configuration_compiles_well(kernel, head_dim, family):
    """All entries of the table, with every number of intervals a column that they are for; no spill but
    those of ``KNOWN_SPILLS``."""
    padded = padded_head_dim(head_dim)
    for intervals in (1, 2, 3):
        for config in candidates(ConfigKey(kernel, family, padded, 2, intervals)):
            check_compiled(kernel, family, head_dim, config, "bf16", intervals)
    for config in candidates(ConfigKey(kernel, family, padded, 2, 2)):
        check_compiled(kernel, family, head_dim, config, "fp16", 2)
    for config in candidates(ConfigKey(kernel, family, padded, 4, 3)):
        check_compiled(kernel, family, head_dim, config, "fp32", 3)


def test_a_branch_or_no_pipeline_would_be_seen():
    """The check on asynchronous copies can fail: one stage leaves none."""
    report = compile_kernel(
        triton_kernels.dq_kernel,
        constants("dq", 64, TileConfig(64, 32, 4, 1), intervals=1, precision="ieee"),
        capability=80,
        warps=4,
        stages=1,
    )
    assert report.async_copies == 0 and report.matrix_instruction == "mma.sync"


@pytest.mark.parametrize("name", ["mixed", "random_eviction", "full", "sliding_window"])
@pytest.mark.parametrize("by_column", [False, True])
def test_split_lists_keep_every_tile_once_and_full_tiles_first(name, by_column):
    rows, columns, blocks = 300, 333, (32, 64)
    intervals = mask_case(name, rows, columns, key_heads=2, seed=7)
    plan = MaskPlan.from_intervals(intervals, rows)
    listed = plan.column_tiles(*blocks) if by_column else plan.row_tiles(*blocks)
    length, block = (rows, blocks[0]) if by_column else (columns, blocks[1])
    split = split_tiles(listed, length, block)
    visible = dense_visibility(intervals, rows)
    for mask, dense in enumerate(visible.flatten(0, 1)):
        for strip in range(split.strips):
            begin, middle, end = split.splits[mask * split.strips + strip].tolist()
            full, partial = split.tiles[begin:middle].tolist(), split.tiles[middle:end].tolist()
            assert full == sorted(full) and partial == sorted(partial)
            across = strip * blocks[1 if by_column else 0]
            for tile in range(-(-length // block)):
                along = slice(tile * block, (tile + 1) * block)
                over = slice(across, across + blocks[1 if by_column else 0])
                cells = dense[along, over] if by_column else dense[over, along]
                assert (tile in full) + (tile in partial) == 1 or not cells.any()
                if tile in full:
                    assert cells.all() and (tile + 1) * block <= length


def test_columns_past_the_end_are_masked_for_all_rows():
    plan = MaskPlan.from_intervals(mask_case("full", 10, 130, 1), 10)
    bounds = padded_bounds(plan)
    assert bounds.shape[-1] == 256
    assert (bounds[..., 0, 130:] == 0).all() and (bounds[..., 1, 130:] >= 10).all()


def test_a_choice_holds_until_it_is_withdrawn():
    query = torch.zeros(1, 4, 1, 64)
    key = config_key("forward", query, 1)
    default = tile_config("forward", query, 1)
    choose(key, TileConfig(16, 16, 1, 1))
    assert tile_config("forward", query, 1) == TileConfig(16, 16, 1, 1)
    choose(key, None)
    assert tile_config("forward", query, 1) == default == candidates(key)[0]


def test_tensors_on_a_cpu_are_refused_outside_the_interpreter():
    query = torch.zeros(1, 4, 1, 64)
    with pytest.raises(ValueError, match="on a GPU, got cpu"):
        triton_forward(query, query, query, MaskPlan.from_intervals(mask_case("full", 4, 4, 1), 4), 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 1e-4)]
)
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_on_a_gpu(width, dtype, tolerance):
    """Compiled forward and backward against the oracle, Nq != Nk, grouped queries."""
    from ernie5.kernels.flashmask.triton_backend import triton_backward
    from tests.kernels.flashmask_cases import MASKS, oracle_attention

    for name in MASKS:
        intervals = mask_case(name, 300, 333, key_heads=2, seed=3)
        generator = torch.Generator().manual_seed(0)
        query, grad_out = (torch.randn(1, 300, 4, width, generator=generator).to(dtype) for _ in range(2))
        key, value = (torch.randn(1, 333, 2, width, generator=generator).to(dtype) for _ in range(2))
        plan = MaskPlan.from_intervals(intervals.cuda(), 300)
        on_gpu = [t.cuda() for t in (query, key, value)]
        out, lse, lost = triton_forward(*on_gpu, plan, width**-0.5, keep_lost=True)
        grads = triton_backward(grad_out.cuda(), *on_gpu, out, lost, lse, plan, width**-0.5)
        wide = [t.double().requires_grad_() for t in (query, key, value)]
        right, _ = oracle_attention(*wide, dense_visibility(intervals, 300))
        right_grads = torch.autograd.grad(right, wide, grad_out.double())
        for got, want in zip((out, *grads), (right, *right_grads)):
            torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=tolerance)
