"""Attention under a column-interval mask on NVIDIA GPUs: tile lists, tile sizes and launches.

The kernels are in :mod:`triton_kernels`. Import this module only where Triton is installed. With
``TRITON_INTERPRET=1`` in the environment before the import, the same code runs on CPU tensors, slowly.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ernie5.kernels.flashmask import triton_kernels
from ernie5.kernels.flashmask.plan import MaskPlan, TileList
from ernie5.kernels.flashmask.triton_configs import TileConfig, constants, padded_head_dim, tile_config

_LOG2E = math.log2(math.e)
_PAD = 128  # a multiple of all tile sizes: per-row and per-column vectors are loaded without a test
_MASKED_ALWAYS = torch.iinfo(torch.int32).max
MAX_HEAD_DIM = 256
# Triton decides at its import whether the kernels run in its interpreter, on CPU tensors.
_INTERPRETED = not isinstance(triton_kernels.forward_kernel, triton.JITFunction)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class SplitTiles(NamedTuple):
    """A tile list whose strips have the full tiles first.

    Attributes:
        splits: int32 ``[B * M * strips, 3]``: where a strip begins, where its partial tiles begin, where it
            ends.
        tiles: int32 ``[visible]`` tile numbers.
        strips: strips of one mask.
    """

    splits: Tensor
    tiles: Tensor
    strips: int


def triton_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, softmax_scale: float, keep_lost: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention and its log-sum-exp.

    Args:
        query: ``[B, Nq, H, D]``, float16, bfloat16 or float32, on a GPU, D at most 256. Any strides, but D
            must be innermost to save a copy.
        key, value: ``[B, Nk, Hk, D]``, H a multiple of Hk.
        plan: the mask, for Nq rows and Nk columns, on the same device.
        softmax_scale: at least 0.
        keep_lost: whether the backward pass will need what rounding takes from the output; float32 loses
            nothing.

    Returns:
        ``[B, Nq, H, D]`` in the query's dtype, float32 ``[B, H, Nq]``, natural logarithm, and what rounding
        took from the first or None. Rows that see no key are 0 and -inf.

    Raises:
        ValueError: a shape, dtype, device or scale that the kernels do not take.
    """
    query, key, value = (_inner_contiguous(t) for t in (query, key, value))
    _check(query, key, value, plan, softmax_scale)
    batch, rows, heads, width = query.shape
    out = torch.empty((batch, rows, heads, width), dtype=query.dtype, device=query.device)
    lost = torch.empty_like(out) if keep_lost and out.dtype != torch.float32 else None
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=query.device)
    if out.numel() == 0 or key.shape[1] == 0:
        return out.zero_(), lse.fill_(-math.inf), None if lost is None else lost.zero_()
    bounds = padded_bounds(plan)
    config = tile_config("forward", query, bounds.shape[2])
    split = _split(plan, config, by_column=False)
    with _on(query.device):
        triton_kernels.forward_kernel[(split.strips, heads, batch)](
            query,
            key,
            value,
            out,
            out if lost is None else lost,
            lse,
            bounds,
            split.splits,
            split.tiles,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            rows,
            key.shape[1],
            bounds.shape[-1],
            heads,
            heads // key.shape[2],
            plan.batch,
            plan.heads,
            softmax_scale * _LOG2E,
            **_constants("forward", query, config, bounds, keep=lost is not None),
        )
    return out, lse, lost


def triton_backward(
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
    """Gradients of :func:`triton_forward` by query, key and value, in their shapes and dtypes.

    Each strip of key columns and each strip of query rows is summed by one program in a fixed order, so equal
    inputs give equal bits.

    Args:
        grad_out: ``[B, Nq, H, D]``.
        out, lost, lse: what the forward returned.
        query, key, value, plan, softmax_scale: what it was given.
    """
    query, key, value, grad_out = (_inner_contiguous(t) for t in (query, key, value, grad_out))
    out, lse = out.contiguous(), lse.contiguous()
    lost = None if lost is None else lost.contiguous()
    _check(query, key, value, plan, softmax_scale)
    if grad_out.shape != query.shape or grad_out.dtype != query.dtype:
        raise ValueError(
            f"the gradient is {grad_out.dtype} {tuple(grad_out.shape)}, the output {query.dtype} "
            f"{tuple(query.shape)}"
        )
    batch, rows, heads, width = query.shape
    columns, key_heads = key.shape[1:3]
    grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)]
    if out.numel() == 0 or columns == 0:
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_()
    grad_query, grad_key, grad_value = grads
    bounds = padded_bounds(plan)
    padded_rows = -(-rows // _PAD) * _PAD
    delta = torch.empty((batch, heads, padded_rows), dtype=torch.float32, device=query.device)
    lse_log2 = torch.empty_like(delta)
    statistics = tile_config("delta", query, bounds.shape[2])
    by_column, by_row = (tile_config(kernel, query, bounds.shape[2]) for kernel in ("dkdv", "dq"))
    if softmax_scale == 0:
        by_column = by_column._replace(fold=False)  # it divides by the scale
    column_split, row_split = _split(plan, by_column, by_column=True), _split(plan, by_row, by_column=False)
    strides = (
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *grad_out.stride()[:3],
    )
    sizes = (
        rows,
        padded_rows,
        columns,
        bounds.shape[-1],
        heads,
        heads // key_heads,
        plan.batch,
        plan.heads,
        softmax_scale,
        softmax_scale * _LOG2E,
    )
    inputs = (query, key, value, grad_out, lse_log2, delta)
    with _on(query.device):
        triton_kernels.delta_kernel[(padded_rows // statistics.block_m, heads, batch)](
            out,
            out if lost is None else lost,
            grad_out,
            lse,
            delta,
            lse_log2,
            *grad_out.stride()[:3],
            rows,
            padded_rows,
            heads,
            DIM=width,
            BLOCK_D=padded_head_dim(width),
            BLOCK_M=statistics.block_m,
            KEPT=lost is not None,
            num_warps=statistics.warps,
        )
        triton_kernels.dkdv_kernel[(column_split.strips, key_heads, batch)](
            *inputs,
            grad_key,
            grad_value,
            bounds,
            column_split.splits,
            column_split.tiles,
            *strides,
            *sizes,
            **_constants("dkdv", query, by_column, bounds),
        )
        triton_kernels.dq_kernel[(row_split.strips, heads, batch)](
            *inputs,
            grad_query,
            bounds,
            row_split.splits,
            row_split.tiles,
            *strides,
            *sizes,
            **_constants("dq", query, by_row, bounds),
        )
    return grad_query, grad_key, grad_value


def _split(plan: MaskPlan, config: TileConfig, by_column: bool) -> SplitTiles:
    """The plan's list for one tile size, kept in the plan."""

    def build() -> SplitTiles:
        sizes = (config.block_m, config.block_n)
        if by_column:
            return split_tiles(plan.column_tiles(*sizes), plan.rows, config.block_m)
        return split_tiles(plan.row_tiles(*sizes), plan.columns, config.block_n)

    return plan.prepared(("triton tiles", config.block_m, config.block_n, by_column), build)


def split_tiles(listed: TileList, length: int, block: int) -> SplitTiles:
    """Stable partition of each strip of a tile list: full tiles, then partial ones.

    Args:
        listed: from :meth:`MaskPlan.row_tiles` or :meth:`MaskPlan.column_tiles`.
        length: rows or columns that the tiles divide. A last tile that reaches past it becomes partial.
        block: size of a tile along them.
    """
    offsets, entries = listed.offsets.long(), listed.entries
    tile, partial = entries >> 1, entries & 1
    if length % block:
        partial = partial | (tile == length // block)
    strip = torch.repeat_interleave(offsets.diff(), output_size=len(entries))
    order = (2 * strip + partial).argsort(stable=True)
    full_before = F.pad((1 - partial).cumsum(0), (1, 0))
    middle = offsets[:-1] + full_before[offsets[1:]] - full_before[offsets[:-1]]
    splits = torch.stack((offsets[:-1], middle, offsets[1:]), -1)
    return SplitTiles(splits.int().contiguous(), tile[order].int().contiguous(), listed.strips)


def padded_bounds(plan: MaskPlan) -> Tensor:
    """Interval bounds by column, int32 ``[B, M, K, 2, padded Nk]``; columns past Nk masked for all rows."""

    def build() -> Tensor:
        by_column = plan.intervals.permute(0, 1, 3, 4, 2)
        padded = -(-plan.columns // _PAD) * _PAD
        bounds = by_column.new_zeros((*by_column.shape[:4], padded))
        bounds[..., 1, plan.columns :] = _MASKED_ALWAYS
        bounds[..., : plan.columns] = by_column
        return bounds

    return plan.prepared(("triton bounds",), build)


def _constants(
    kernel: str, query: Tensor, config: TileConfig, bounds: Tensor, *, keep: bool = False
) -> dict[str, Any]:
    relaxed = query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    precision = "tf32" if relaxed else "ieee"
    width, intervals = query.shape[-1], bounds.shape[2]
    fixed = constants(kernel, width, config, intervals=intervals, precision=precision, keep=keep)
    return {**fixed, "num_warps": config.warps, "num_stages": config.stages}


def _inner_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check(query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, softmax_scale: float) -> None:
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape:
        raise ValueError(
            "query, key and value are [B, N, heads, D] and the latter two alike, got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]) or query.shape[2] % key.shape[2]:
        raise ValueError(f"query {tuple(query.shape)} and key {tuple(key.shape)} do not fit each other")
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        raise ValueError(
            f"query, key and value share one of float16, bfloat16, float32; got {query.dtype}, {key.dtype}, "
            f"{value.dtype}"
        )
    if query.shape[3] > MAX_HEAD_DIM:
        raise ValueError(f"head dim {query.shape[3]} is over the limit of {MAX_HEAD_DIM}")
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value are on different devices: {query.device}, {key.device}, {value.device}"
        )
    if not (query.is_cuda or _INTERPRETED):
        raise ValueError(f"the Triton kernels take tensors on a GPU, got {query.device}")
    if plan.rows != query.shape[1] or plan.columns != key.shape[1]:
        raise ValueError(
            f"the plan is for {plan.rows} rows and {plan.columns} columns, query and key have "
            f"{query.shape[1]} and {key.shape[1]}"
        )
    if plan.batch not in (1, query.shape[0]) or plan.heads not in (1, key.shape[2]):
        raise ValueError(
            f"the plan is for {plan.batch} batch rows and {plan.heads} mask heads; with {query.shape[0]} "
            f"rows and {key.shape[2]} key heads they must be 1 or as many"
        )
    if plan.intervals.device != query.device:
        raise ValueError(f"the plan is on {plan.intervals.device}, the query on {query.device}")
    if not softmax_scale >= 0:
        raise ValueError(f"softmax_scale must be at least 0, got {softmax_scale}")
