"""Softmax cross-entropy of a linear head without its whole table of logits.

A vocabulary of V and n positions make n x V logits, which plain autograd writes, reads and keeps several
times. Here a few rows at a time pass through the head, and their share of the gradients is made while they
are in the cache (as in Cut Your Losses, arXiv 2411.09009, and the Liger kernels).

Shape letters: n positions, d width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ernie5.kernels.checks import require_together

_CHUNK = 1 << 19  # logits at a time: two megabytes in float32


def linear_cross_entropy(hidden_nd: Tensor, head_Vd: Tensor, target_n: Tensor, weight_n: Tensor) -> Tensor:
    """``sum_i weight_i * -log softmax(head hidden_i)[target_i]``, float32.

    Args:
        hidden_nd: positions, in the compute dtype.
        head_Vd: rows of the head; of the hidden dtype or wider (master weights).
        target_n: int64 in ``[0, V)``.
        weight_n: weight of each position; no gradient flows to it.

    Raises:
        ValueError: shapes that don't fit one another, targets that are no whole numbers or, on CPUs, beyond
            the head's rows.
    """
    require_together({"hidden": hidden_nd, "head": head_Vd, "targets": target_n, "weights": weight_n})
    if target_n.dtype != torch.int64:
        raise ValueError(f"targets must be int64, got {target_n.dtype}")
    if hidden_nd.dim() != 2 or head_Vd.dim() != 2 or hidden_nd.shape[1] != head_Vd.shape[1]:
        raise ValueError(f"hidden {tuple(hidden_nd.shape)} and head {tuple(head_Vd.shape)} do not fit")
    if not head_Vd.shape[0]:
        raise ValueError("a head of no rows has no softmax")
    if target_n.shape != hidden_nd.shape[:1] or weight_n.shape != target_n.shape:
        raise ValueError(
            f"targets {tuple(target_n.shape)} and weights {tuple(weight_n.shape)} must be [{len(hidden_nd)}]"
        )
    if target_n.device.type == "cpu" and len(target_n):
        low, high = (int(bound) for bound in target_n.aminmax())
        if low < 0 or high >= len(head_Vd):
            raise ValueError(f"targets must be in [0, {len(head_Vd)}), got {low if low < 0 else high}")
    return _LinearCrossEntropy.apply(hidden_nd, head_Vd, target_n, weight_n)


def linear_cross_entropy_reference(
    hidden_nd: Tensor, head_Vd: Tensor, target_n: Tensor, weight_n: Tensor
) -> Tensor:
    """The same by definition, with all logits at once."""
    logits = F.linear(hidden_nd, head_Vd.to(hidden_nd.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (F.cross_entropy(logits, target_n, reduction="none") * weight_n).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, target, weight):  # type: ignore[no-untyped-def]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        narrow = head.to(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_head = torch.zeros(head.shape, dtype=wide, device=head.device) if wanted else None
        rows = max(1, _CHUNK // len(head))
        for start in range(0, len(hidden), rows):
            here = slice(start, start + rows)
            part, at, share = hidden[here], target[here, None], weight[here, None].to(wide)
            logits = (part @ narrow.T).to(wide)
            logits -= logits.amax(-1, keepdim=True)
            picked = logits.gather(-1, at)
            logits.exp_()
            sums = logits.sum(-1, keepdim=True)
            total += (share * (sums.log() - picked)).sum()
            if grad_hidden is not None and grad_head is not None:
                logits *= share / sums
                logits.scatter_add_(-1, at, -share)
                slope = logits.to(hidden.dtype)
                grad_hidden[here] = slope @ narrow
                if wide == hidden.dtype:
                    grad_head.addmm_(slope.T, part)
                else:
                    grad_head += slope.T @ part
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is None:
            return None, None, None, None
        return grad_hidden * grad.to(grad_hidden.dtype), (grad_head * grad).to(ctx.head_dtype), None, None
