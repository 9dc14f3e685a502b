"""The fused expert kernels without a GPU: interpreted, and compiled for one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ernie5.kernels import experts_triton
from ernie5.kernels.flashmask.triton_compile import compile_kernel

_TYPES = {
    "gate_up": "*e",
    "x": "*e",
    "down": "*e",
    "slot": "*i32",
    "tile_expert": "*i32",
    "tile_first": "*i32",
    "expert_end": "*i32",
    "slot_weight": "*fp32",
}


@pytest.mark.timeout(900)
def test_interpreted_kernels_equal_the_reference():
    path = Path(__file__).with_name("triton_experts_interpreter.py")
    options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--timeout=600")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        cwd=path.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed.group(1)) >= 14, done.stdout[-5000:] + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("capability,rows,matrix", [(80, 16, "mma.sync"), (90, 64, "wgmma")])
@pytest.mark.parametrize("name", ["gather_swiglu", "project"])
def test_kernels_compile_well(name, capability, rows, matrix):
    depth = 128 if rows == 16 else 64
    report = compile_kernel(
        getattr(experts_triton, f"{name}_kernel"),
        {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": depth, "PRECISION": "tf32"},
        capability=capability,
        stages=3,
        types={**_TYPES, "hidden": "*e", "out": "*fp32"},
        aligned=("width", "inner"),
    )
    assert report.spill_bytes == 0 and report.async_copies > 0, report
    assert report.matrix_instruction == matrix and report.shared_bytes <= 163 << 10, report


def test_rows_are_tiled_by_expert():
    """Each row that counts lies in exactly one tile, and tiles do not cross experts."""
    expert = torch.tensor([[2, 0], [2, 2], [1, 2], [2, 0]])
    valid = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool()
    tiles = experts_triton.grouped_tiles(expert, valid, 4, block_m=2)
    found: dict[int, list[int]] = {}
    for owner, first in zip(tiles.expert.tolist(), tiles.first.tolist()):
        if owner < 4:
            rows = tiles.slot[first : min(first + 2, int(tiles.end[owner]))].tolist()
            assert rows
            found.setdefault(owner, []).extend(rows)
    assert found == {0: [1, 7], 1: [4], 2: [0, 2, 5, 6]}
