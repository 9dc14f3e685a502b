"""Both forms of the GPU benchmark's masks say the same, or it would time different work."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from ernie5.kernels.flashmask.plan import MaskPlan

PATH = Path(__file__).parents[2] / "benchmarks" / "_gpu_masks.py"


@pytest.fixture(scope="module")
def gpu_masks():
    spec = importlib.util.spec_from_file_location("_gpu_masks", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("length", [40, 257])
def test_predicates_equal_intervals(gpu_masks, length):
    key_heads, group = 2, 3
    found = gpu_masks.gpu_masks(length, key_heads, group, "cpu")
    assert len({mask.name for mask in found}) == 12
    place = torch.arange(length)
    for mask in found:
        dense = MaskPlan.from_intervals(mask.intervals(), length).dense()
        for head in range(key_heads * group):
            seen = dense[0, head // group % dense.shape[1]]
            if mask.predicate is None:
                assert seen.all()
                continue
            batch = torch.zeros((), dtype=torch.int64)
            said = mask.predicate(batch, torch.tensor(head), place[:, None], place[None, :])
            assert torch.equal(said.expand(length, length), seen), mask.name


def test_lengths_are_positive_and_complete(gpu_masks):
    found = gpu_masks.document_lengths(1000)
    assert sum(found) == 1000 and min(found) > 0 and len(found) == 8
