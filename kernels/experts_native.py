"""The sparse feed-forward on CPUs by the C++ kernels, with gather, SwiGLU and scatter inside."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels.dispatch import dispatch_order
from ernie5.kernels.forward_mode import refuse_tangents
from ernie5.kernels.native import build

_COUNTS = (
    "tokens",
    "slots",
    "experts",
    "width",
    "hidden",
    "rows",
    "input_bfloat16",
    "weight_bfloat16",
    "threads",
)
_INPUTS = ("input", "gate_up", "down", "slot", "offsets", "row_of_slot", "combine")
_RESULTS = ("gates", "out", "grad_out", "grad_input", "grad_gate_up", "grad_down", "grad_combine")
_WORTH_THREADS = 1 << 22
_DTYPES = (torch.float32, torch.bfloat16)


class _Experts(ctypes.Structure):
    """The structure ``Experts`` of experts.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_void_p) for name in (*_INPUTS, *_RESULTS)),
    )


def sparse_swiglu(
    x_Td: Tensor,
    gate_up_E2hd: Tensor,
    down_Edh: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    valid_Tk: Tensor | None,
) -> Tensor:
    """See :func:`ernie5.kernels.experts.sparse_swiglu`; sums run in a fixed order."""
    slot, offsets, row_of_slot = _route(expert_Tk, valid_Tk, len(down_Edh))
    out, _ = _sparse_swiglu(
        x_Td, gate_up_E2hd, down_Edh, weight_Tk.float(), slot, offsets, row_of_slot, _panel()
    )
    return out


def supports(x: Tensor) -> bool:
    """Whether the kernels take tokens like these: float32 or bfloat16 on a CPU, and a library exists."""
    return x.device.type == "cpu" and x.dtype in _DTYPES and _available()


def takes_weights(weight: Tensor) -> bool:
    """Whether weights like this one can be read: float32 or bfloat16 on a CPU."""
    return weight.device.type == "cpu" and weight.dtype in _DTYPES


def prefers(x: Tensor) -> bool:
    """Whether they are faster than torch's own products: not for bfloat16 where the CPU multiplies it."""
    return supports(x) and (x.dtype == torch.float32 or not _multiplies_bfloat16())


@torch.library.custom_op("ernie5::sparse_swiglu", mutates_args=())
def _sparse_swiglu(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight: Tensor,
    slot: Tensor,
    offsets: Tensor,
    row_of_slot: Tensor,
    panel: int,
) -> tuple[Tensor, Tensor]:
    """Output float32 ``[T, d]`` and, for the backward pass, gate and up before the activation: float32
    ``[R, 2, h padded to panels]``. Routes are those of :func:`_route`."""
    x, gate_up, down, weight = (tensor.contiguous() for tensor in (x, gate_up, down, weight))
    gates = torch.empty(len(slot), 2, -(-down.shape[2] // panel) * panel)
    out = torch.empty(x.shape)
    call = _describe(x, gate_up, down, weight, slot, offsets, row_of_slot)
    call.gates, call.out = gates.data_ptr(), out.data_ptr()
    _run("experts_forward", call)
    return out, gates


@_sparse_swiglu.register_fake
def _(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight: Tensor,
    slot: Tensor,
    offsets: Tensor,
    row_of_slot: Tensor,
    panel: int,
) -> tuple[Tensor, Tensor]:
    gates = (slot.shape[0], 2, -(-down.shape[2] // panel) * panel)
    return x.new_empty(x.shape, dtype=torch.float32), x.new_empty(gates, dtype=torch.float32)


@torch.library.custom_op("ernie5::sparse_swiglu_backward", mutates_args=())
def _sparse_swiglu_backward(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight: Tensor,
    slot: Tensor,
    offsets: Tensor,
    row_of_slot: Tensor,
    gates: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, x, gate_up, down, weight = (t.contiguous() for t in (grad.float(), x, gate_up, down, weight))
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
    grad_gate_up, grad_down = torch.empty(gate_up.shape), torch.empty(down.shape)
    call = _describe(x, gate_up, down, weight, slot, offsets, row_of_slot)
    call.gates, call.grad_out, call.grad_input = gates.data_ptr(), grad.data_ptr(), grad_x.data_ptr()
    call.grad_gate_up, call.grad_down = grad_gate_up.data_ptr(), grad_down.data_ptr()
    call.grad_combine = grad_weight.data_ptr()
    _run("experts_backward", call)
    return grad_x, grad_gate_up.to(gate_up.dtype), grad_down.to(down.dtype), grad_weight


@_sparse_swiglu_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight: Tensor,
    slot: Tensor,
    offsets: Tensor,
    row_of_slot: Tensor,
    gates: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gate_up), torch.empty_like(down), torch.empty_like(weight)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, grad, _grad_gates):  # type: ignore[no-untyped-def]
    refuse_tangents("the gradient of native experts", "backend='reference' has one", grad)
    return *_sparse_swiglu_backward(grad, *ctx.saved_tensors), None, None, None, None


_sparse_swiglu.register_autograd(_gradients, setup_context=_remember)


def _route(expert: Tensor, valid: Tensor | None, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """int32: slots by expert ``[R]`` (``token * k + place``), offsets of the experts ``[E + 1]``, row of each
    slot (-1: off)."""
    order, counts = dispatch_order(expert, valid, experts)
    if len(counts) > experts:
        raise ValueError(f"expert {int(expert.max())} was chosen, there are {experts}")
    slot = order.int()
    row_of_slot = torch.full((expert.numel(),), -1, dtype=torch.int32)
    row_of_slot[order] = torch.arange(len(order), dtype=torch.int32)
    return slot, F.pad(counts.cumsum(0), (1, 0)).int(), row_of_slot


def _describe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight: Tensor,
    slot: Tensor,
    offsets: Tensor,
    row_of_slot: Tensor,
) -> _Experts:
    """The call's description; the caller keeps the tensors alive."""
    return _Experts(
        tokens=len(x),
        slots=weight.shape[1],
        experts=len(down),
        width=x.shape[1],
        hidden=down.shape[2],
        rows=len(slot),
        input_bfloat16=x.dtype == torch.bfloat16,
        weight_bfloat16=down.dtype == torch.bfloat16,
        # Starting a thread takes as long as a few million operations.
        threads=torch.get_num_threads() if len(slot) * down[0].numel() > _WORTH_THREADS else 1,
        input=x.data_ptr(),
        gate_up=gate_up.data_ptr(),
        down=down.data_ptr(),
        slot=slot.data_ptr(),
        offsets=offsets.data_ptr(),
        row_of_slot=row_of_slot.data_ptr(),
        combine=weight.data_ptr(),
    )


@torch.compiler.assume_constant_result
def _panel() -> int:
    """Columns of a packed panel: what the kernels pad h to."""
    return int(_library().vector_panel())


def _run(name: str, call: _Experts) -> None:
    build.run(_library(), name, call, f"{call.rows} rows of {call.width} x {call.hidden}")


@torch.compiler.assume_constant_result
def _available() -> bool:
    return build.available("experts on this CPU use torch's grouped products")


@torch.compiler.assume_constant_result
def _multiplies_bfloat16() -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & build.cpu_flags())


@functools.cache
def _library() -> ctypes.CDLL:
    library = build.library()
    library.experts_size.restype = library.vector_panel.restype = ctypes.c_int64
    assert library.experts_size() == ctypes.sizeof(_Experts)
    return library
