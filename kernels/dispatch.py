"""The order in which tokens go to their experts."""

from __future__ import annotations

import torch
from torch import Tensor


def dispatch_order(expert_Tk: Tensor, valid_Tk: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """Slots by expert: flat slot numbers int64 ``[R]`` (``token * k + place``, ascending inside an expert)
    and rows of each expert int64 ``[E]``."""
    flat = expert_Tk.reshape(-1)
    if valid_Tk is None:
        order = flat.argsort(stable=True)
        return order, torch.bincount(flat, minlength=experts)
    chosen = valid_Tk.reshape(-1).nonzero().squeeze(1)
    order = chosen[flat[chosen].argsort(stable=True)]
    return order, torch.bincount(flat[chosen], minlength=experts)
