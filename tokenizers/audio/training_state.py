"""Resumable state of a training run: one safetensors file, written atomically.

The file's tensors are the module's and the optimiser's; its metadata holds the step and the history as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_state(
    path: Path, module: nn.Module, optimiser: torch.optim.AdamW, step: int, history: dict[str, Any]
) -> None:
    """Write the state after ``step`` steps; a reader sees the old file or the new one, never a part."""
    tensors = {f"module.{name}": tensor.contiguous() for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for moment, value in optimiser.state[parameter].items():
            tensors[f"{moment}.{name}"] = value
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"step": str(step), "history": json.dumps(history)})
    os.replace(partial, path)


def load_state(path: Path, module: nn.Module, optimiser: torch.optim.AdamW) -> tuple[int, dict[str, Any]]:
    """Restore module and optimiser in place; returns the step to go on from and the history."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        metadata = file.metadata()
    module.load_state_dict({name: tensors[f"module.{name}"] for name in module.state_dict()})
    for name, parameter in module.named_parameters():
        if f"step.{name}" in tensors:
            optimiser.state[parameter] = {
                moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS
            }
    return int(metadata["step"]), json.loads(metadata["history"])
