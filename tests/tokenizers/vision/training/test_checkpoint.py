"""Checkpoints hold what a step changes, and one that is half written replaces none."""

import pytest
import torch
from torch import nn

from ernie5.tokenizers.vision.training import checkpoint as checkpoints
from ernie5.tokenizers.vision.training.checkpoint import (
    Checkpoint,
    named,
    optimizer_state,
    restore_optimizer,
    write_json,
)


def stepped(layer, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()


def test_tensors_counters_and_optimizers_come_back(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    stepped(layer, optimizer)
    tensors = named("model", layer.state_dict()) | named("model2", {"weight": torch.zeros(1)})
    tensors |= named("adamw", optimizer_state(optimizer))
    path = tmp_path / "run" / checkpoints.FILE
    assert Checkpoint.read(path) is None
    Checkpoint(tensors, {"step": 3, "curve": [{"a": 0.1}]}, {"format": "7"}).write(path)
    found = Checkpoint.read(path)
    assert found.counters == {"step": 3, "curve": [{"a": 0.1}]} and found.labels == {"format": "7"}
    assert found.part("model").keys() == {"weight", "bias"}
    other = nn.Linear(4, 3)
    other.load_state_dict(found.part("model"))
    resumed = torch.optim.AdamW(other.parameters())
    restore_optimizer(resumed, found.part("adamw"))
    stepped(layer, optimizer)
    stepped(other, resumed)
    assert torch.equal(layer.weight, other.weight) and torch.equal(layer.bias, other.bias)


def test_what_breaks_off_leaves_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / checkpoints.FILE
    Checkpoint({"x": torch.ones(2)}, {"step": 1}, {}).write(path)
    write_json(tmp_path / "metrics.json", {"step": 1})

    def broken(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoints, "save_file", broken)
    with pytest.raises(OSError, match="full"):
        Checkpoint({"x": torch.zeros(2)}, {"step": 2}, {}).write(path)
    assert Checkpoint.read(path).counters == {"step": 1}
    with pytest.raises(TypeError):
        write_json(tmp_path / "metrics.json", {"step": object()})
    assert '"step": 1' in (tmp_path / "metrics.json").read_text()
