"""Sparse feed-forward for inference on NVIDIA GPUs: two grouped products and all around them fused.

The first product gathers the tokens of each expert as it loads them, computes gate and up side by side and
applies SwiGLU before it stores; the second scales each row by its router weight and stores it in the place of
its slot. What :func:`ernie5.kernels.experts.sparse_swiglu` writes between its steps (gathered rows, gate and
up) never reaches memory. Only forward: a backward pass needs gate and up, which that function keeps.

Shape letters: T tokens, k slots a token, E experts, d model width, h expert width, R = dispatched rows.
"""

# A jitted function's parameters are its launch signature; upper-case ones are compile-time constants.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class GroupedTiles(NamedTuple):
    """Rows sorted by expert, cut into tiles that belong to one expert each.

    Attributes:
        slot: int32 ``[R]``; ``token * k + place`` of each row.
        expert: int32 ``[tiles]``; E for tiles that are left over, as their number is bounded, not known.
        first: int32 ``[tiles]``, the first row of a tile.
        end: int32 ``[E]``, one past the last row of an expert.
    """

    slot: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor


def sparse_swiglu_triton(
    x_Td: Tensor,
    gate_up_E2hd: Tensor,
    down_Edh: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    valid_Tk: Tensor | None = None,
) -> Tensor:
    """As :func:`ernie5.kernels.experts.sparse_swiglu`, without a gradient; waits for the device nowhere.

    Returns:
        float32 ``[T, d]``. The k rows of a token are summed in the order of its slots: deterministic.

    Raises:
        ValueError: tensors on a CPU, of different types, or that need a gradient.
    """
    if not (x_Td.is_cuda or _INTERPRETED):
        raise ValueError(f"the Triton kernels take tensors on a GPU, got {x_Td.device}")
    if not x_Td.dtype == gate_up_E2hd.dtype == down_Edh.dtype:
        raise ValueError(
            f"tokens are {x_Td.dtype}, gate and up {gate_up_E2hd.dtype}, down {down_Edh.dtype}; give one type"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x_Td, gate_up_E2hd, down_Edh, weight_Tk)):
        raise ValueError("this path has no backward pass: use sparse_swiglu, or torch.no_grad()")
    tokens, slots = expert_Tk.shape
    experts, width, inner = down_Edh.shape
    x_Td = x_Td if x_Td.stride(-1) == 1 else x_Td.contiguous()
    gate_up_E2hd, down_Edh = gate_up_E2hd.contiguous(), down_Edh.contiguous()
    block_m, block_n, block_k, warps, stages = _tiles(x_Td, tokens * slots, experts)
    tiles = grouped_tiles(expert_Tk, valid_Tk, experts, block_m)
    hidden = torch.empty((tokens * slots, inner), dtype=x_Td.dtype, device=x_Td.device)
    # Slots that are not computed count as 0.
    rows = torch.zeros((tokens * slots, width), dtype=torch.float32, device=x_Td.device)
    precision = "ieee" if x_Td.dtype == torch.float32 else "tf32"
    options = {"num_warps": warps, "num_stages": stages}
    with torch.cuda.device(x_Td.device) if x_Td.is_cuda else nullcontext():
        gather_swiglu_kernel[(len(tiles.expert), triton.cdiv(inner, block_n))](
            x_Td,
            gate_up_E2hd,
            hidden,
            *tiles,
            x_Td.stride(0),
            width,
            inner,
            slots,
            experts,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            PRECISION=precision,
            **options,
        )
        project_kernel[(len(tiles.expert), triton.cdiv(width, block_n))](
            hidden,
            down_Edh,
            rows,
            weight_Tk.reshape(-1).float().contiguous(),
            *tiles,
            width,
            inner,
            experts,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            PRECISION=precision,
            **options,
        )
    return rows.view(tokens, slots, width).sum(1)


def grouped_tiles(expert_Tk: Tensor, valid_Tk: Tensor | None, experts: int, block_m: int) -> GroupedTiles:
    """The rows of each expert in tiles of ``block_m``; sizes follow from shapes, so nothing is waited for."""
    flat = expert_Tk.reshape(-1)
    if valid_Tk is not None:
        flat = flat.masked_fill(~valid_Tk.reshape(-1), experts)  # sorted behind all experts
    slot = flat.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.index_add_(0, flat, torch.ones_like(flat))[:experts]
    end = counts.cumsum(0)
    tile_end = ((counts + block_m - 1) // block_m).cumsum(0)
    # Each expert has at most one tile that is not full.
    tile = torch.arange(-(-len(flat) // block_m) + experts, device=flat.device)
    expert = torch.searchsorted(tile_end, tile, right=True)
    owner = expert.clamp(max=experts - 1)
    tiles_before = tile_end - (counts + block_m - 1) // block_m
    first = (end - counts)[owner] + (tile - tiles_before[owner]) * block_m
    return GroupedTiles(slot.int(), expert.int(), first.int(), end.int())


def _tiles(x_Td: Tensor, rows: int, experts: int) -> tuple[int, int, int, int, int]:
    """Block sizes (rows, outputs, depth), warps and stages: few rows an expert take a flat tile."""
    if not x_Td.is_cuda:
        return 16, 32, 32, 4, 1
    if x_Td.dtype == torch.float32:
        return 32, 32, 32, 4, 2
    return (16, 64, 128, 4, 3) if rows <= 32 * experts else (64, 64, 64, 4, 3)


@triton.jit
def gather_swiglu_kernel(
    x,
    gate_up,
    hidden,
    slot,
    tile_expert,
    tile_first,
    expert_end,
    x_stride,
    width,
    inner,
    slots,
    experts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``hidden[row] = silu(gate_e x) * (up_e x)`` of the row's token. Grid: (tiles, inner / BLOCK_N)."""
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert >= experts:
        return
    row = tl.load(tile_first + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    live = row < tl.load(expert_end + expert)
    token = tl.load(slot + row, mask=live, other=0) // slots
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_rows = x + token.to(tl.int64)[:, None] * x_stride
    gate_rows = gate_up + (expert.to(tl.int64) * 2 * inner + output[None, :]) * width
    up_rows = gate_rows + inner.to(tl.int64) * width
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        place = start + depth
        inside = (output < inner)[None, :] & (place < width)[:, None]
        tokens = tl.load(x_rows + place[None, :], mask=live[:, None] & (place < width)[None, :], other=0.0)
        weights = tl.load(gate_rows + place[:, None], mask=inside, other=0.0)
        gate = tl.dot(tokens, weights, gate, input_precision=PRECISION)
        weights = tl.load(up_rows + place[:, None], mask=inside, other=0.0)
        up = tl.dot(tokens, weights, up, input_precision=PRECISION)
    made = gate * tl.sigmoid(gate) * up
    pointers = hidden + row.to(tl.int64)[:, None] * inner + output[None, :]
    tl.store(pointers, made.to(hidden.dtype.element_ty), mask=live[:, None] & (output < inner)[None, :])


@triton.jit
def project_kernel(
    hidden,
    down,
    out,
    slot_weight,
    slot,
    tile_expert,
    tile_first,
    expert_end,
    width,
    inner,
    experts,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``out[slot] = weight * down_e hidden[row]``, float32. Grid: (tiles, width / BLOCK_N)."""
    expert = tl.load(tile_expert + tl.program_id(0))
    if expert >= experts:
        return
    row = tl.load(tile_first + tl.program_id(0)) + tl.arange(0, BLOCK_M)
    live = row < tl.load(expert_end + expert)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    hidden_rows = hidden + row.to(tl.int64)[:, None] * inner
    down_rows = down + (expert.to(tl.int64) * width + output[None, :]) * inner
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        place = start + depth
        rows = tl.load(hidden_rows + place[None, :], mask=live[:, None] & (place < inner)[None, :], other=0.0)
        inside = (output < width)[None, :] & (place < inner)[:, None]
        weights = tl.load(down_rows + place[:, None], mask=inside, other=0.0)
        acc = tl.dot(rows, weights, acc, input_precision=PRECISION)
    target = tl.load(slot + row, mask=live, other=0)
    acc = acc * tl.load(slot_weight + target, mask=live, other=0.0)[:, None]
    pointers = out + target.to(tl.int64)[:, None] * width + output[None, :]
    tl.store(pointers, acc, mask=live[:, None] & (output < width)[None, :])


_INTERPRETED = not isinstance(project_kernel, triton.JITFunction)
