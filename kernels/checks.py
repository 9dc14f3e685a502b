"""What all kernels refuse alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


def require_together(named: Mapping[str, Tensor]) -> None:
    """Refuse what :func:`require_tensor` does, and tensors on another device than the first.

    Raises:
        ValueError: naming it.
    """
    first, where = next(iter(named.items()))
    for name, tensor in named.items():
        require_tensor(tensor, name)
        if tensor.device != where.device:
            raise ValueError(
                f"{name} are on {tensor.device}, {first} on {where.device}; all must be together"
            )
