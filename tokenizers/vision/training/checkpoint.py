"""Checkpoints of training runs: one safetensors file of tensors and counters, replaced as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE = "checkpoint.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that a step of a run changes.

    Attributes:
        tensors: named ``part.name``, see :func:`named` and :meth:`part`.
        counters: the rest, as JSON has it: steps, seconds, the curve.
        labels: what the file says about itself, such as its format.
    """

    tensors: Mapping[str, Tensor]
    counters: Mapping[str, Any]
    labels: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write to ``path``; the previous one stays until the new one is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.contiguous() for name, value in self.tensors.items()}
        metadata = {"state": json.dumps(self.counters), **self.labels}
        save_file(tensors, path.with_suffix(".part"), metadata)
        os.replace(path.with_suffix(".part"), path)

    @classmethod
    def read(cls, path: Path) -> Checkpoint | None:
        """What ``path`` holds; None where there is no such file."""
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            labels = dict(file.metadata())
        return cls(load_file(path), json.loads(labels.pop("state")), labels)

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, by their names inside it."""
        return part_of(self.tensors, name)


def named(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` under the names that they have in a checkpoint."""
    return {f"{part}.{name}": value for name, value in tensors.items()}


def part_of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """What :func:`named` was given for ``part``."""
    start = f"{part}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimiser's state, named by the number of their parameter: ``3.exp_avg``."""
    return {
        f"{index}.{name}": value
        for index, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give ``optimizer`` the state that :func:`optimizer_state` took; its groups stay as they are."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, field = name.partition(".")
        state.setdefault(int(index), {})[field] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


@torch.no_grad()
def round_to_half(model: nn.Module) -> None:
    """Give ``model`` the float16 values that its file of weights will hold, still as float32."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half().float())


def write_json(path: Path, value: object) -> None:
    """Write JSON for people to ``path``; the previous file stays until the new one is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json.part").write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    os.replace(path.with_suffix(".json.part"), path)
