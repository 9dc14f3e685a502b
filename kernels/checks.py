"""What all kernels refuse alike."""

from __future__ import annotations

import torch
from torch import Tensor


def require_tensor(value: Tensor, name: str) -> None:
    """Refuse what is no plain tensor with data: lists, arrays, sparse tensors, the meta device.

    Raises:
        ValueError: naming it.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    # A subclass may say that it is on the meta device and have data of its own.
    if value.layout != torch.strided or (type(value) is Tensor and value.is_meta):
        raise ValueError(f"{name} must be a dense tensor with data, got {value.layout} on {value.device}")
