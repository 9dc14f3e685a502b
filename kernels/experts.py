"""Sparse feed-forward: every token through its chosen experts, as grouped matrix products.

Shape letters: T tokens, k slots a token, E experts, d model width, h expert width, R = dispatched rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sparse_swiglu(
    x_Td: Tensor,
    gate_up_E2hd: Tensor,
    down_Edh: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    valid_Tk: Tensor | None = None,
) -> Tensor:
    """``sum_j weight_j * down_e(silu(gate_e x) * up_e x)`` over the k chosen experts e of each token.

    Args:
        x_Td: tokens, in the compute dtype.
        gate_up_E2hd: gate (first h rows) and up projections.
        down_Edh: down projections.
        expert_Tk: int64 expert of each slot.
        weight_Tk: combine weights.
        valid_Tk: slots to compute; the others cost nothing. All, if None.

    Returns:
        float32 ``[T, d]``. No token is dropped; experts without tokens cost nothing.
    """
    tokens, slots = expert_Tk.shape
    flat = expert_Tk.reshape(-1)
    if valid_Tk is None:
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(down_Edh))
    else:
        chosen = valid_Tk.reshape(-1).nonzero().squeeze(1)
        order = chosen[flat[chosen].argsort(stable=True)]
        counts = torch.bincount(flat[chosen], minlength=len(down_Edh))
    token_R = torch.div(order, slots, rounding_mode="floor")
    offsets = counts.cumsum(0).int()
    rows = _Dispatch.apply(x_Td, token_R)
    hidden = _grouped(rows, gate_up_E2hd, offsets)
    gate, up = hidden.chunk(2, -1)
    weight_R = weight_Tk.reshape(-1).index_select(0, order)
    hidden = F.silu(gate) * up * weight_R.to(hidden.dtype)[:, None]
    return _Combine.apply(_grouped(hidden, down_Edh, offsets), token_R, tokens)


def sparse_swiglu_reference(
    x_Td: Tensor,
    gate_up_E2hd: Tensor,
    down_Edh: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    valid_Tk: Tensor | None = None,
) -> Tensor:
    """The same by definition: one expert after the other."""
    out = torch.zeros(x_Td.shape, dtype=torch.promote_types(x_Td.dtype, torch.float32))
    weight = weight_Tk if valid_Tk is None else weight_Tk * valid_Tk
    for expert in range(len(down_Edh)):
        gate, up = (x_Td @ gate_up_E2hd[expert].T).chunk(2, -1)
        share = (weight * (expert_Tk == expert)).sum(-1, keepdim=True)
        out = out + (F.silu(gate) * up) @ down_Edh[expert].T * share
    return out


def _grouped(rows_Rd: Tensor, weight_Eod: Tensor, offsets_E: Tensor) -> Tensor:
    # grouped_mm wants at least one row. A product of none keeps the graph whole.
    if len(rows_Rd) == 0:
        return rows_Rd @ weight_Eod[0].T
    return F.grouped_mm(rows_Rd, weight_Eod.transpose(1, 2), offs=offsets_E)


class _Dispatch(torch.autograd.Function):
    """Gather of token rows whose backward sums in float32 (index_select's own adds in the row dtype)."""

    @staticmethod
    def forward(ctx, x, token):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(token)
        ctx.tokens = x.shape[0]
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (token,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        out = torch.zeros(ctx.tokens, grad.shape[1], dtype=wide, device=grad.device)
        return out.index_add_(0, token, grad.to(wide)).to(grad.dtype), None


class _Combine(torch.autograd.Function):
    """Sum of each token's rows in float32."""

    @staticmethod
    def forward(ctx, rows, token, tokens):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(token)
        ctx.dtype = rows.dtype
        wide = torch.promote_types(rows.dtype, torch.float32)
        out = torch.zeros(tokens, rows.shape[1], dtype=wide, device=rows.device)
        return out.index_add_(0, token, rows.to(wide))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (token,) = ctx.saved_tensors
        return grad.to(ctx.dtype).index_select(0, token), None, None
