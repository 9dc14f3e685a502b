"""Putting a model where it is to run."""

from __future__ import annotations

import torch

from ernie5.backbone.execution import Execution, choose_device, set_tf32
from ernie5.backbone.model.regions import Regions
from ernie5.backbone.model.transformer import Backbone


def place(model: Backbone, execution: Execution) -> torch.device:
    """Move a model to its device, in place, and compile its regions where that is asked for.

    Make an optimizer of its parameters afterwards.

    Raises:
        InvalidInputError: the device isn't there.
    """
    device = choose_device(execution.device)
    if device.type == "cuda":
        set_tf32(execution.tf32)
    model.to(device)
    if execution.compile:
        model.regions = Regions.compiled()
    return device
