"""The one door to attention under a column-interval mask."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from typing import Literal, overload

import torch
from torch import Tensor

from ernie5.kernels.checks import FLOATS, require_tensor
from ernie5.kernels.flashmask import native
from ernie5.kernels.flashmask.masks import sliding_window
from ernie5.kernels.flashmask.paddle import intervals_from_startend
from ernie5.kernels.flashmask.panels import panel_attention
from ernie5.kernels.flashmask.plan import MaskPlan
from ernie5.kernels.flashmask.reference import dense_attention
from ernie5.kernels.forward_mode import refuse_tangents

_log = logging.getLogger(__name__)
_TRITON_WIDTH = 256
_LARGEST_SCALE = 1e30  # beyond, its product with an ordinary score leaves float32's range
_HAS_FORWARD_MODE = "backend='reference' has one"
BACKENDS = ("auto", "native", "triton", "panels", "reference")


@overload
def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | None = ...,
    *,
    causal: bool = ...,
    window_size: int | tuple[int, int] | None = ...,
    plan: MaskPlan | None = ...,
    softmax_scale: float | None = ...,
    return_softmax_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | None = ...,
    *,
    causal: bool = ...,
    window_size: int | tuple[int, int] | None = ...,
    plan: MaskPlan | None = ...,
    softmax_scale: float | None = ...,
    return_softmax_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | None = None,
    *,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    plan: MaskPlan | None = None,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention under a mask given as a plan or in Paddle's column form.

    Args:
        query: ``[B, Nq, H, D]``.
        key, value: ``[B, Nk, Hk, D]`` with H a multiple of Hk (grouped queries). Any strides, also views of
            one tensor.
        startend_row_indices: int32 ``[B, 1 or Hk, Nk, 1 | 2 | 4]``, Paddle's FlashMask form; see
            :func:`intervals_from_startend`.
        causal: with ``startend_row_indices``, a window or no mask: hide later keys, aligned at the bottom
            right.
        window_size: keys seen to the left and right of the diagonal, inclusive; instead of
            ``startend_row_indices``.
        plan: a prepared mask, instead of the three above.
        softmax_scale: default ``D ** -0.5``.
        return_softmax_lse: also return the natural log-sum-exp, float32 ``[B, H, Nq]`` (no gradient flows
            through it, whatever the backend).
        backend: one of ``BACKENDS``; None takes the environment's ``ERNIE_MULTI_ATTENTION`` or ``auto``:
            Triton on NVIDIA GPUs, the C++ kernels on CPUs, and what both can't do (float64, a machine
            without a compiler) by panels in plain torch.

    Returns:
        ``[B, Nq, H, D]`` in the query's dtype; rows that see no key are 0 and their log-sum-exp is -inf.

    Differentiable once, in reverse mode; ``reference`` as often as wanted and in both modes. What is hidden
    adds nothing to results and gradients, even where it is not finite (but see docs/kernels.md about Triton).

    Raises:
        ValueError: shapes, dtypes or devices that don't fit one another, or an unknown backend.
        NotImplementedError: an input carries a tangent, and the backend has no forward mode.
    """
    _check(query, key, value)
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    if plan is None:
        intervals = _mask(startend_row_indices, query, key, causal, window_size)
        plan = MaskPlan.from_intervals(intervals, query.shape[1])
    elif startend_row_indices is not None or causal or window_size is not None:
        raise ValueError(
            "a plan is the whole mask: give either it, or startend_row_indices, causal and window_size"
        )
    _check_plan(plan, query, key)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else _number(softmax_scale)
    if not -_LARGEST_SCALE <= scale <= _LARGEST_SCALE:
        raise ValueError(
            f"softmax_scale must be a finite number between {-_LARGEST_SCALE:g} and {_LARGEST_SCALE:g}, got "
            f"{softmax_scale!r}"
        )
    chosen = choose_backend(query, backend)
    if scale == 0 and chosen in ("native", "triton"):
        chosen = "panels"  # the kernels hide by -inf, and 0 times that is NaN
    if chosen == "panels":
        out, lse = panel_attention(query, key, value, plan, scale)
    elif chosen == "reference":
        out, lse = dense_attention(query, key, value, plan, scale)
    else:
        refuse_tangents(f"{chosen} attention", _HAS_FORWARD_MODE, query, key, value)
        train = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        out, lse, _lost = _attention(query, key, value, plan.intervals, scale, chosen, train)
    return (out, lse.detach()) if return_softmax_lse else out


def _number(value: float) -> float:
    """NaN for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _mask(
    indices: Tensor | None,
    query: Tensor,
    key: Tensor,
    causal: bool,
    window_size: int | tuple[int, int] | None,
) -> Tensor:
    rows, columns = query.shape[1], key.shape[1]
    if window_size is None:
        return intervals_from_startend(indices, rows, key, causal)
    if indices is not None:
        raise ValueError("window_size and startend_row_indices are two masks: give one of them")
    sides = window_size if isinstance(window_size, tuple) else (window_size, window_size)
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in sides):
        raise ValueError(f"window_size must be a whole number or two (left, right), got {window_size!r}")
    # A window wider than everything is no window; larger numbers would overflow.
    left, right = (min(side, rows + columns) for side in sides)
    return sliding_window(rows, columns, left, 0 if causal else right).to(key.device)


def choose_backend(query: Tensor, backend: str | None = None) -> str:
    """The backend that attention on tensors like ``query`` takes; see :func:`flashmask_attention`."""
    wanted = backend or os.environ.get("ERNIE_MULTI_ATTENTION", "auto")
    if wanted not in BACKENDS:
        raise ValueError(f"unknown attention backend {wanted!r}; known: {', '.join(BACKENDS)}")
    if wanted == "native" and not native.supports(query):
        raise ValueError(
            f"the native kernels do not take {query.dtype} with D={query.shape[-1]} on {query.device} here; "
            "they take fp32 and bf16 on a CPU with D <= 512 and need a C++ compiler or a wheel with them"
        )
    if wanted == "triton" and query.device.type != "cuda":
        raise ValueError(f"the Triton kernels take tensors on an NVIDIA GPU, got {query.device}")
    if wanted != "auto":
        return wanted
    if query.device.type == "cuda":
        return "triton" if _triton_takes(query) else "panels"
    return "native" if query.device.type == "cpu" and native.supports(query) else "panels"


def _triton_takes(query: Tensor) -> bool:
    known = query.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return known and query.shape[-1] <= _TRITON_WIDTH and _has_triton()


@torch.compiler.assume_constant_result
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        _warn_once("attention on this GPU uses the slower portable backend: triton is not installed")
    return found


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


@torch.library.custom_op("ernie5::flashmask_attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, intervals: Tensor, scale: float, backend: str, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and what rounding took from the output, which only training in 16 bits needs: the
    backward pass takes the row sums of dO * O, and where a row sees few keys the rounding of O is most of
    dK. Without, it has no elements."""
    plan = MaskPlan.of(intervals, query.shape[1])
    if backend == "triton":
        from ernie5.kernels.flashmask.triton_backend import triton_forward

        out, lse, lost = triton_forward(query, key, value, plan, scale, train)
    else:
        out, lse, lost = native.native_forward(query, key, value, plan, scale, train)
    return out, lse, query.new_empty(0) if lost is None else lost


@_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, intervals: Tensor, scale: float, backend: str, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, heads, _width = query.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    kept = train and query.dtype != torch.float32
    return (
        out,
        query.new_empty((batch, heads, rows), dtype=torch.float32),
        torch.empty_like(out) if kept else query.new_empty(0),
    )


@torch.library.custom_op("ernie5::flashmask_attention_backward", mutates_args=())
def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lost: Tensor,
    lse: Tensor,
    intervals: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = MaskPlan.of(intervals, query.shape[1])
    kept = lost if lost.numel() else None
    if backend == "triton":
        from ernie5.kernels.flashmask.triton_backend import triton_backward

        return triton_backward(grad_out, query, key, value, out, kept, lse, plan, scale)
    return native.native_backward(grad_out, query, key, value, out, kept, lse, plan, scale)


@_attention_backward.register_fake
def _(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lost: Tensor,
    lse: Tensor,
    intervals: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    made = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    return next(made), next(made), next(made)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, intervals, scale, backend, _train = inputs
    out, lse, lost = output
    ctx.save_for_backward(query, key, value, out, lost, lse, intervals)
    ctx.mark_non_differentiable(lse, lost)
    ctx.scale, ctx.backend = scale, backend
    # The backward pass finds the plan by its intervals, as long as somebody holds it.
    ctx.plan = MaskPlan.living(intervals, query.shape[1])


def _gradients(ctx, grad_out, *_others):  # type: ignore[no-untyped-def]
    refuse_tangents(f"the gradient of {ctx.backend} attention", _HAS_FORWARD_MODE, grad_out)
    grads = _attention_backward(grad_out, *ctx.saved_tensors, ctx.scale, ctx.backend)
    return (*grads, None, None, None, None)


_attention.register_autograd(_gradients, setup_context=_remember)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [B, N, H, D], got {tuple(tensor.shape)}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, the query {query.dtype} on {query.device}; "
                "all three must agree"
            )
    if query.dtype not in FLOATS:
        raise ValueError(
            f"attention takes floating-point tensors of 16, 32 or 64 bits, got {query.dtype}; convert them"
        )
    if key.shape != value.shape:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in shape")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} and key {tuple(key.shape)} differ in B or D")
    if 0 in query.shape or 0 in key.shape:
        raise ValueError(f"nothing to attend: query {tuple(query.shape)}, key {tuple(key.shape)}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")


def _check_plan(plan: MaskPlan, query: Tensor, key: Tensor) -> None:
    if not isinstance(plan, MaskPlan):
        raise ValueError(
            f"plan must be a MaskPlan, got {type(plan).__name__}; MaskPlan.from_intervals makes one"
        )
    batch, heads, columns = plan.intervals.shape[:3]
    if plan.rows != query.shape[1] or columns != key.shape[1]:
        raise ValueError(
            f"the plan is for {plan.rows} rows and {columns} columns, the query has "
            f"{query.shape[1]} rows and the key {key.shape[1]} columns"
        )
    if batch not in (1, query.shape[0]) or heads not in (1, key.shape[2]):
        raise ValueError(
            f"the plan is for {batch} batch entries and {heads} mask heads; with {query.shape[0]} "
            f"entries and {key.shape[2]} key heads they must be 1 or as many"
        )
    if plan.intervals.device != query.device:
        raise ValueError(f"the plan is on {plan.intervals.device}, the query on {query.device}")
