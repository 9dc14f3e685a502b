"""The native CPU backend: hands tensors and the plan's arrays to the C++ kernels."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels.flashmask.panels import panel_backward, panel_forward
from ernie5.kernels.flashmask.plan import MaskPlan
from ernie5.kernels.native import build

_LAST_ROW = 2**31 - 1
_MOST_WIDTH = 512
_NOT_FINITE = 3  # the kernels' code for a result that is not


class _Strided(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("row", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )


class _Attention(ctypes.Structure):
    """The structure ``Attention`` of attention.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "rows", "columns", "width")),
        ("bfloat16", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_double),
        *((name, _Strided) for name in ("query", "key", "value", "out", "lost")),
        ("lse", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("mask_batch", "mask_heads", "intervals", "padded_columns")),
        *((name, ctypes.c_int64) for name in ("row_block", "column_block")),
        *((name, ctypes.c_void_p) for name in ("bounds", "touched", "offsets", "entries")),
        *((name, _Strided) for name in ("grad_out", "grad_query", "grad_key", "grad_value")),
        ("chunks", ctypes.c_int64),
    )


class NativeMask(NamedTuple):
    """A plan as the kernels read it; int32, contiguous.

    ``bounds`` ``[masks, K, 2, columns padded to tiles]``, ``touched`` ``[masks, column blocks, K,
    2]`` (first and last row that the interval masks over the block), tile lists by rows and by columns.
    """

    row_block: int
    column_block: int
    bounds: Tensor
    touched: Tensor
    row_offsets: Tensor
    row_entries: Tensor
    column_offsets: Tensor
    column_entries: Tensor


def native_mask(plan: MaskPlan) -> NativeMask:
    """The plan's arrays, made once a plan."""
    return plan.prepared("native", lambda: _native_mask(plan))


def _native_mask(plan: MaskPlan) -> NativeMask:
    row_block, column_block = _blocks(plan)
    by_row = plan.row_tiles(row_block, column_block)
    by_column = plan.column_tiles(row_block, column_block)
    start, end = plan.intervals.flatten(0, 1).transpose(1, 2).unbind(-1)
    padding = -plan.columns % column_block
    start, end = F.pad(start, (0, padding)), F.pad(end, (0, padding))
    empty = start >= end
    if padding:  # columns beyond the last one are hidden from every row
        end[:, 0, -padding:], empty[:, 0, -padding:] = _LAST_ROW, False
    blocks = (*start.shape[:2], -1, column_block)
    first = start.masked_fill(empty, _LAST_ROW).view(blocks).amin(-1)
    last = end.masked_fill(empty, 0).view(blocks).amax(-1)
    return NativeMask(
        row_block,
        column_block,
        torch.stack((start, end), 2).contiguous(),
        torch.stack((first, last), -1).transpose(1, 2).contiguous(),
        by_row.offsets,
        by_row.entries,
        by_column.offsets,
        by_column.entries,
    )


def _blocks(plan: MaskPlan) -> tuple[int, int]:
    """Tile sizes: small ones waste less at the edges of short documents, and cost little elsewhere; very
    long rows take larger ones, so that the lists stay at a few megabytes. Columns fill whole panels."""
    columns = 48 if 48 % _library().vector_panel() == 0 else 64
    return (48, columns) if plan.rows * plan.columns <= 1 << 28 else (96, 2 * columns)


def native_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, softmax_scale: float, keep_lost: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``[B, Nq, H, D]`` and ``[B, Nk, Hk, D]`` (float32 or bfloat16, any strides) to the output in the same
    dtype, the natural log-sum-exp, float32 ``[B, H, Nq]``, and with ``keep_lost`` what rounding took from the
    output, like it; None without, and in float32.

    A result that is not finite may come of a hidden value (its weight of 0 times NaN is NaN), so then the
    panels find out what is really seen.
    """
    query, key, value = _dense_last(query), _dense_last(key), _dense_last(value)
    out = torch.empty(query.shape, dtype=query.dtype)
    lost = torch.empty_like(out) if keep_lost and out.dtype != torch.float32 else None
    lse = torch.empty(query.shape[0], query.shape[2], query.shape[1])
    mask = native_mask(plan)  # alive until the kernel is done, like all tensors that it reads
    call = _describe(query, key, value, out, lost, lse, plan, mask, softmax_scale)
    call.offsets, call.entries = mask.row_offsets.data_ptr(), mask.row_entries.data_ptr()
    if _run("flashmask_forward", call):
        return out, lse, lost
    exact, lse = panel_forward(query, key, value, plan.expanded(len(query)), softmax_scale, strict=True)
    out = exact.to(query.dtype).contiguous()
    if lost is not None:
        lost = (exact - out).nan_to_num(0.0, 0.0, 0.0).to(out.dtype).contiguous()
    return out, lse.contiguous(), lost


def native_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lost: Tensor | None,
    lse: Tensor,
    plan: MaskPlan,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous, in their dtype. Sums run in a fixed order, so equal
    inputs give equal bits on one number of threads. What is not finite is treated as in
    :func:`native_forward`, whose results ``out``, ``lost`` and ``lse`` are."""
    query, key, value = _dense_last(query), _dense_last(key), _dense_last(value)
    grad_out = _dense_last(grad_out.to(query.dtype))
    grad_query, grad_key, grad_value = (torch.empty(t.shape, dtype=t.dtype) for t in (query, key, value))
    mask = native_mask(plan)
    call = _describe(query, key, value, out, lost, lse, plan, mask, softmax_scale)
    call.offsets, call.entries = mask.column_offsets.data_ptr(), mask.column_entries.data_ptr()
    call.grad_out = _strided(grad_out)
    call.grad_query, call.grad_key = _strided(grad_query), _strided(grad_key)
    call.grad_value = _strided(grad_value)
    # Parts for the threads to share when there are few heads; each costs a copy of the query's gradient.
    parts = -(-2 * call.threads // max(1, call.batch * call.key_heads)) if call.threads > 1 else 1
    call.chunks = min(8, parts)
    if _run("flashmask_backward", call):
        return grad_query, grad_key, grad_value
    exact = out if lost is None else out.float() + lost
    mended = panel_backward(
        grad_out, None, query, key, value, exact, lse, plan.expanded(len(query)), softmax_scale, strict=True
    )
    grad_query, grad_key, grad_value = (grad.contiguous() for grad in mended)
    return grad_query, grad_key, grad_value


def supports(query: Tensor) -> bool:
    """Whether the kernels take tensors like this one: float32 or bfloat16, D <= 512, and a library exists."""
    if (
        query.device.type != "cpu"
        or query.dtype not in (torch.float32, torch.bfloat16)
        or query.shape[-1] > _MOST_WIDTH
    ):
        return False
    return _available()


@torch.compiler.assume_constant_result
def _available() -> bool:
    return build.available("attention on this CPU uses the slower portable backend")


@functools.cache
def _library() -> ctypes.CDLL:
    library = build.library()
    library.flashmask_attention_size.restype = library.vector_panel.restype = ctypes.c_int64
    assert library.flashmask_attention_size() == ctypes.sizeof(_Attention)
    return library


def _run(name: str, call: _Attention) -> bool:
    """Whether all results are finite."""
    size = f"{call.rows} x {call.columns} with {call.heads} heads"
    return build.run(_library(), name, call, size, known=_NOT_FINITE) == 0


def _describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lost: Tensor | None,
    lse: Tensor,
    plan: MaskPlan,
    mask: NativeMask,
    softmax_scale: float,
) -> _Attention:
    """The call's description; the caller keeps the tensors alive."""
    batch, rows, heads, width = query.shape
    call = _Attention(
        batch=batch,
        heads=heads,
        key_heads=key.shape[2],
        rows=rows,
        columns=key.shape[1],
        width=width,
        bfloat16=query.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
        scale=softmax_scale,
        query=_strided(query),
        key=_strided(key),
        value=_strided(value),
        out=_strided(out),
        lost=_Strided() if lost is None else _strided(lost),
        lse=lse.data_ptr(),
        mask_batch=plan.intervals.shape[0],
        mask_heads=plan.heads,
        intervals=plan.intervals.shape[3],
        padded_columns=mask.bounds.shape[-1],
        row_block=mask.row_block,
        column_block=mask.column_block,
        bounds=mask.bounds.data_ptr(),
        touched=mask.touched.data_ptr(),
    )
    return call


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strided(tensor: Tensor) -> _Strided:
    batch, row, head, _ = tensor.stride()
    return _Strided(tensor.data_ptr(), batch, row, head)
