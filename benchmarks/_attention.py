"""The masks and the rivals of the attention benchmark.

A mask here is two bounds a key column: query rows in ``[first, last)`` see it. Both FlashMask and
FlexAttention get these two int32 vectors, as a data loader would hand them over, and make of them what they
need.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ernie5.kernels.flashmask import MaskPlan, flashmask_attention
from ernie5.kernels.flashmask.attention import choose_backend

HEADS, WIDTH = 8, 64
TILE = 128
WINDOW = 512
DOCUMENTS = 6
Bounds = tuple[Tensor, Tensor]


def document_causal(length: int, documents: int = DOCUMENTS) -> Bounds:
    """Packed documents of random lengths; a position sees what lies before it in its own."""
    position = torch.arange(length, dtype=torch.int32)
    last = position.clone()
    for start, end in _documents(length, documents):
        last[start:end] = end
    return position, last


def sliding(length: int) -> Bounds:
    """A position sees itself and the 511 before it."""
    position = torch.arange(length, dtype=torch.int32)
    return position, (position + WINDOW).clamp(max=length)


def mixed_multimodal(length: int, documents: int = 4) -> Bounds:
    """Packed documents of text and pictures in turn: text is causal, a picture's cells see one another."""
    first, last = document_causal(length, documents)
    draw = random.Random(1)
    for start, end in _documents(length, documents):
        place = start
        while (place := place + draw.randint(32, 256)) < end:
            cells = min(draw.choice((64, 256, 576)), end - place)
            first[place : place + cells] = place
            place += cells
    return first, last


MASKS: dict[str, Callable[[int], Bounds]] = {
    "document_causal": document_causal,
    "sliding_512": sliding,
    "mixed_multimodal": mixed_multimodal,
}


def _documents(length: int, documents: int) -> list[tuple[int, int]]:
    cuts = sorted(random.Random(0).sample(range(1, length), documents - 1))
    return list(zip([0, *cuts], [*cuts, length]))


def tensors(length: int, dtype: torch.dtype, heads: int = HEADS, *, grad: bool = False) -> list[Tensor]:
    """Query, key and value ``[1, N, H, D]``."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, length, heads, WIDTH, generator=generator).to(dtype).requires_grad_(grad)
        for _ in range(3)
    ]


def make_plan(bounds: Bounds) -> MaskPlan:
    """Our side's work for a new row, the backend's own arrays of both directions included."""
    first, last = bounds
    length = len(first)
    start = torch.stack((torch.zeros_like(first), last), -1)
    end = torch.stack((first, torch.full_like(last, length)), -1)
    plan = MaskPlan.from_intervals(torch.stack((start, end), -1)[None, None], length)
    if choose_backend(torch.empty(0, 0, HEADS, WIDTH)) == "native":
        from ernie5.kernels.flashmask.native import native_mask

        native_mask(plan)
    return plan


def visible_tiles(plan: MaskPlan) -> int:
    """Tiles of 128 x 128 that some query sees: the area that work is counted on."""
    return int(plan.row_tiles(TILE, TILE).offsets[-1])


def forward_flops(plan: MaskPlan, heads: int = HEADS) -> float:
    """Multiplications and additions of a forward pass over the visible tiles."""
    return 4.0 * TILE * TILE * WIDTH * visible_tiles(plan) * heads


def ours(inputs: list[Tensor], plan: MaskPlan, backend: str | None = None) -> Tensor:
    """Forward pass of FlashMask."""
    query, key, value = inputs
    return flashmask_attention(query, key, value, plan=plan, backend=backend)


def forward_backward(
    attend: Callable[[list[Tensor]], Tensor], inputs: list[Tensor], gradient: Tensor
) -> None:
    """Output and the gradients of query, key and value."""
    torch.autograd.grad(attend(inputs), inputs, gradient)


def dense_mask(bounds: Bounds) -> Tensor:
    """bool ``[N, N]`` for SDPA."""
    first, last = bounds
    row = torch.arange(len(first), dtype=torch.int32)[:, None]
    return (row >= first) & (row < last)


def sdpa(inputs: list[Tensor], mask: Tensor | None) -> Tensor:
    """torch's fused attention under a dense mask, or causal without one (which shows more than our masks)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None).transpose(
        1, 2
    )


class Flex:
    """FlexAttention, compiled anew for each length: forward only, as torch has no backward for it on CPUs."""

    def __init__(self) -> None:
        torch._dynamo.config.recompile_limit = 64  # beyond it calls would run uncompiled
        self.attend: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
        self.compiled_mask: Callable[[Bounds], Any] = torch.compile(self.eager_mask, dynamic=False)

    @staticmethod
    def eager_mask(bounds: Bounds) -> Any:
        """A block mask of 128 x 128 blocks, made without compiling: it tests each of the N² pairs."""
        first, last = bounds
        length = first.shape[0]

        def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (row >= first[column]) & (row < last[column])

        return create_block_mask(visible, 1, 1, length, length, device="cpu", BLOCK_SIZE=TILE)

    def __call__(self, inputs: list[Tensor], block_mask: Any) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
        out: Tensor = self.attend(query, key, value, block_mask=block_mask)
        return out.transpose(1, 2)
