"""Sparse feed-forward: every token through its chosen experts, as grouped matrix products.

Shape letters: T tokens, k slots a token, E experts, d model width, h expert width, R = dispatched rows.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels import experts_native
from ernie5.kernels.checks import FLOATS, require_together
from ernie5.kernels.dispatch import dispatch_order
from ernie5.kernels.forward_mode import refuse_tangents

BACKENDS = ("auto", "native", "grouped", "triton", "reference")


def sparse_swiglu(
    x_Td: Tensor,
    gate_up_E2hd: Tensor,
    down_Edh: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    valid_Tk: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """``sum_j weight_j * down_e(silu(gate_e x) * up_e x)`` over the k chosen experts e of each token.

    Args:
        x_Td: tokens, in the compute dtype.
        gate_up_E2hd: gate (first h rows) and up projections; of x's dtype or wider (master weights).
        down_Edh: down projections, of the same dtype as ``gate_up_E2hd``.
        expert_Tk: int64 expert of each slot.
        weight_Tk: combine weights.
        valid_Tk: slots to compute; the others cost nothing. All, if None.
        backend: one of ``BACKENDS``; None takes the environment's ``ERNIE_MULTI_EXPERTS`` or ``auto``: the
            C++ kernels for float32 on CPUs, and for bfloat16 where the CPU has no instruction for it; else
            torch's ``grouped_mm``. ``triton`` is for NVIDIA GPUs and for inference only: it has no gradient.

    Returns:
        float32 ``[T, d]``. No token is dropped; experts without tokens cost nothing.

    Raises:
        ValueError: shapes, dtypes or devices that don't fit one another, an expert that there is not (looked
            at on CPUs), or an unknown or impossible backend.
        NotImplementedError: an input carries a tangent of forward-mode differentiation, which ``reference``
            alone knows.
    """
    _check(x_Td, gate_up_E2hd, down_Edh, expert_Tk, weight_Tk, valid_Tk)
    chosen = choose_backend(x_Td, backend)
    if chosen == "native" and not experts_native.takes_weights(down_Edh):
        if backend == "native":
            raise ValueError(f"the native expert kernels do not take weights of {down_Edh.dtype}")
        chosen = "grouped"
    if chosen == "reference":
        return sparse_swiglu_reference(x_Td, gate_up_E2hd, down_Edh, expert_Tk, weight_Tk, valid_Tk)
    if chosen in ("native", "triton"):
        instead = "backend='reference' has one"
        refuse_tangents(f"{chosen} experts", instead, x_Td, gate_up_E2hd, down_Edh, weight_Tk)
    if chosen == "native":
        return experts_native.sparse_swiglu(x_Td, gate_up_E2hd, down_Edh, expert_Tk, weight_Tk, valid_Tk)
    if chosen == "triton":
        from ernie5.kernels.experts_triton import sparse_swiglu_triton

        return sparse_swiglu_triton(x_Td, gate_up_E2hd, down_Edh, expert_Tk, weight_Tk, valid_Tk)
    return _sparse_swiglu_grouped(x_Td, gate_up_E2hd, down_Edh, expert_Tk, weight_Tk, valid_Tk)


def sparse_swiglu_reference(
    x_Td: Tensor,
    gate_up_E2hd: Tensor,
    down_Edh: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    valid_Tk: Tensor | None = None,
) -> Tensor:
    """The same by definition: one expert after the other."""
    dtype = x_Td.dtype
    out = torch.zeros(x_Td.shape, dtype=torch.promote_types(dtype, torch.float32), device=x_Td.device)
    weight = weight_Tk if valid_Tk is None else torch.where(valid_Tk, weight_Tk, 0)
    for expert in range(len(down_Edh)):
        gate, up = (x_Td @ gate_up_E2hd[expert].to(dtype).T).chunk(2, -1)
        share = (weight * (expert_Tk == expert)).sum(-1, keepdim=True)
        out = out + (F.silu(gate) * up) @ down_Edh[expert].to(dtype).T * share
    return out


def _check(
    x: Tensor, gate_up: Tensor, down: Tensor, expert: Tensor, weight: Tensor, valid: Tensor | None
) -> None:
    named = {"tokens": x, "gate_up": gate_up, "down": down, "experts": expert, "weights": weight}
    require_together(named if valid is None else {**named, "valid": valid})
    for name, tensor in (("tokens", x), ("gate_up", gate_up), ("weights", weight)):
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} must be floating-point of 16, 32 or 64 bits, got {tensor.dtype}")
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"valid must be bool, got {valid.dtype}")
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            f"expected tokens [T, d] and weights [E, 2h, d] and [E, d, h], got {tuple(x.shape)}, "
            f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        )
    if gate_up.dtype != down.dtype:
        raise ValueError(f"gate_up is {gate_up.dtype}, down {down.dtype}; the two weights must agree")
    experts, width, hidden = down.shape
    if not experts or not width or not hidden:
        raise ValueError(f"experts without extent: down is {tuple(down.shape)}")
    if expert.is_floating_point() or expert.dtype == torch.bool:
        raise ValueError(f"experts must be whole numbers, got {expert.dtype}")
    if expert.device.type == "cpu" and expert.numel():
        low, high = (int(bound) for bound in expert.aminmax())
        if low < 0 or high >= experts:
            raise ValueError(f"expert {low if low < 0 else high} was chosen, there are {experts}")
    if x.shape[1] != width or gate_up.shape != (experts, 2 * hidden, width):
        raise ValueError(
            f"tokens {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} do not fit"
        )
    slots = expert.shape
    if (
        len(slots) != 2
        or slots[0] != len(x)
        or weight.shape != slots
        or (valid is not None and valid.shape != slots)
    ):
        raise ValueError(
            f"choices, weights, valid must be [{len(x)}, k], got {tuple(slots)}, {tuple(weight.shape)}"
            f"{'' if valid is None else f' and {tuple(valid.shape)}'}"
        )


def choose_backend(x: Tensor, backend: str | None = None) -> str:
    """The backend that tokens like ``x`` take; see :func:`sparse_swiglu`."""
    wanted = backend or os.environ.get("ERNIE_MULTI_EXPERTS", "auto")
    if wanted not in BACKENDS:
        raise ValueError(f"unknown expert backend {wanted!r}; known: {', '.join(BACKENDS)}")
    if wanted == "native" and not experts_native.supports(x):
        raise ValueError(f"the native expert kernels do not take {x.dtype} on {x.device} here")
    if wanted == "triton" and (x.device.type != "cuda" or torch.is_grad_enabled()):
        raise ValueError(
            f"the Triton expert kernel is for inference on an NVIDIA GPU, got {x.device} with gradients "
            f"{'on' if torch.is_grad_enabled() else 'off'}"
        )
    if wanted != "auto":
        return wanted
    if x.dtype == torch.float64:
        return "reference"  # grouped_mm does not take it
    return "native" if experts_native.prefers(x) else "grouped"


def _sparse_swiglu_grouped(
    x_Td: Tensor,
    gate_up_E2hd: Tensor,
    down_Edh: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    valid_Tk: Tensor | None,
) -> Tensor:
    tokens, slots = expert_Tk.shape
    order, counts = dispatch_order(expert_Tk, valid_Tk, len(down_Edh))
    token_R = torch.div(order, slots, rounding_mode="floor")
    offsets = counts.cumsum(0).int()
    rows = _Dispatch.apply(x_Td, token_R)
    hidden = _grouped(rows, gate_up_E2hd.to(x_Td.dtype), offsets)
    gate, up = hidden.chunk(2, -1)
    weight_R = weight_Tk.reshape(-1).index_select(0, order)
    hidden = F.silu(gate) * up * weight_R.to(hidden.dtype)[:, None]
    return _Combine.apply(_grouped(hidden, down_Edh.to(x_Td.dtype), offsets), token_R, tokens)


def _grouped(rows_Rd: Tensor, weight_Eod: Tensor, offsets_E: Tensor) -> Tensor:
    # grouped_mm wants at least one row. A product of none keeps the graph whole.
    if len(rows_Rd) == 0:
        return rows_Rd @ weight_Eod[0].T
    # It also wants rows that begin at multiples of 16 bytes, here and in its backward pass.
    unit = 16 // rows_Rd.element_size()
    width, out = -rows_Rd.shape[1] % unit, -weight_Eod.shape[1] % unit
    if width or out:
        rows_Rd, weight_Eod = F.pad(rows_Rd, (0, width)), F.pad(weight_Eod, (0, width, 0, out))
    made = F.grouped_mm(rows_Rd, weight_Eod.transpose(1, 2), offs=offsets_E)
    return made[:, : made.shape[1] - out] if out else made


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
