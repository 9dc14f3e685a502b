"""Named masks and an oracle that the conformance tests of all attention backends share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ernie5.kernels.flashmask import masks, spans

PUBLISHED = (
    "full",
    "causal",
    "sliding_window",
    "causal_document",
    "document",
    "share_question",
    "global_sliding_window",
    "causal_blockwise",
    "prefix_lm_document",
    "prefix_lm_causal",
    "qk_sparse",
    "random_eviction",
)
OURS = ("text_and_images", "image_window", "sound_window", "video_history", "mixed", "dynamic_window")
MASKS = PUBLISHED + OURS


def mask_cases(rows: int, columns: int, key_heads: int, seed: int = 0) -> dict[str, Tensor]:
    """One mask of each kind, int32 ``[1, 1 or key_heads, columns, K, 2]``, aligned at the bottom right."""
    return {name: mask_case(name, rows, columns, key_heads, seed) for name in MASKS}


def mask_case(name: str, rows: int, columns: int, key_heads: int, seed: int = 0) -> Tensor:
    """The mask ``name`` of :data:`MASKS` with sizes drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed * 1000 + MASKS.index(name))
    return _BUILDERS[name](_Draw(rows, columns, key_heads, generator))


def oracle_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by definition in float64, from visibility, bool ``[B or 1, 1 or Hk, Nq, Nk]``.

    Returns the output ``[B, Nq, H, D]`` and the log-sum-exp ``[B, H, Nq]``, both float64 and differentiable.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups = query.shape[2] // key.shape[2]
    q, k, v = query.double(), *(t.double().repeat_interleave(groups, 2) for t in (key, value))
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(groups, 1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    seen = visible.any(-1, keepdim=True)
    weights = torch.where(visible, (scores - scores.detach().amax(-1, keepdim=True)).exp(), 0.0)
    weights = weights / torch.where(seen, weights.sum(-1, keepdim=True), 1.0)
    lse = torch.where(visible, scores, float("-inf")).masked_fill(~seen, 0.0).logsumexp(-1)
    lse = lse.masked_fill(~seen[..., 0], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def dense_visibility(intervals: Tensor, rows: int) -> Tensor:
    """bool ``[B, M, rows, Nk]`` straight from the meaning of masked intervals."""
    row = torch.arange(rows)[:, None, None]
    start, end = intervals.unsqueeze(2).unbind(-1)  # [B, M, 1, Nk, K]
    return ~((start <= row) & (row < end)).any(-1)


class _Draw:
    """Sizes for one case."""

    def __init__(self, rows: int, columns: int, key_heads: int, generator: torch.Generator) -> None:
        self.rows, self.columns, self.key_heads, self.generator = rows, columns, key_heads, generator

    def number(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def lengths(self, total: int, parts: int) -> list[int]:
        """Up to ``parts`` positive lengths that sum up to ``total``."""
        cuts = torch.randint(0, total + 1, (parts - 1,), generator=self.generator).tolist()
        edges = sorted({0, *cuts, total})
        return [end - start for start, end in pairwise(edges)]

    def flags(self, count: int, share: float) -> Tensor:
        return torch.rand(count, generator=self.generator) < share

    def window(self) -> int:
        return self.number(0, max(1, self.columns // 4))


def _share_question(draw: _Draw) -> Tensor:
    groups = [draw.lengths(length, 4) for length in draw.lengths(draw.columns, 3)]
    return masks.share_question(draw.rows, draw.columns, groups)


def _prefix_lm_document(draw: _Draw) -> Tensor:
    documents = []
    for length in draw.lengths(draw.columns, 4):
        prefix = draw.number(0, length)
        documents.append((prefix, length - prefix))
    return masks.prefix_lm_document(draw.rows, draw.columns, documents)


def _random_eviction(draw: _Draw) -> Tensor:
    first = draw.number(0, draw.columns)
    evicted = masks.random_evictions(draw.columns, draw.key_heads, first, draw.generator)
    return masks.random_eviction(draw.rows, draw.columns, evicted)


def _text_and_images(draw: _Draw) -> list[spans.Span]:
    return [
        spans.text(length) if draw.number(0, 1) else spans.blocks(draw.lengths(length, 4))
        for length in draw.lengths(max(1, draw.columns // 3), 4)
    ]


def _image_window(draw: _Draw) -> list[spans.Span]:
    width = draw.number(1, max(1, int(draw.columns**0.5) // 2))
    height = draw.number(1, max(1, draw.columns // (3 * width)))
    return [spans.image_window(height, width, draw.number(0, height))]


def _sound_window(draw: _Draw) -> list[spans.Span]:
    frames = draw.number(1, max(1, draw.columns // 3))
    anchors = draw.number(1, frames) if draw.number(0, 3) else None
    return [spans.sound_window(frames, draw.number(1, frames), anchors)]


def _video_history(draw: _Draw) -> list[spans.Span]:
    sizes = draw.lengths(max(1, draw.columns // 3), 6)
    window = draw.number(1, len(sizes)) if draw.number(0, 1) else None
    return [spans.video(sizes, draw.flags(len(sizes), 0.5), window)]


def _packed(*kinds: Callable[[_Draw], list[spans.Span]]) -> Callable[[_Draw], Tensor]:
    """Two documents of spans of these kinds, each followed by text, as far as they fit, and padding."""

    def build(draw: _Draw) -> Tensor:
        documents: list[list[spans.Span]] = []
        left = draw.columns
        for _ in range(2):
            document = [spans.text(draw.number(0, max(1, draw.columns // 10)))]
            for kind in kinds:
                document += [*kind(draw), spans.text(draw.number(0, max(1, draw.columns // 10)))]
            if sum(map(len, document)) <= left:
                documents.append(document)
                left -= sum(map(len, document))
        return spans.packed(draw.rows, draw.columns, documents)

    return build


def _dynamic_window(draw: _Draw) -> Tensor:
    lengths = draw.lengths(draw.columns, 4)
    step = max(1, draw.columns // 8)
    windows = spans.windows_by_length(
        lengths, ((0, 4 * step), (2 * step, step), (4 * step, max(1, step // 2)))
    )
    return spans.dynamic_window(draw.rows, draw.columns, lengths, windows, draw.number(0, 4))


_BUILDERS: dict[str, Callable[[_Draw], Tensor]] = {
    "full": lambda d: masks.full(d.rows, d.columns),
    "causal": lambda d: masks.causal(d.rows, d.columns),
    "sliding_window": lambda d: masks.sliding_window(
        d.rows, d.columns, d.window(), d.number(0, 1) * d.window()
    ),
    "causal_document": lambda d: masks.causal_document(d.rows, d.columns, d.lengths(d.columns, 5)),
    "document": lambda d: masks.document(d.rows, d.columns, d.lengths(d.columns, 5)),
    "share_question": _share_question,
    "global_sliding_window": lambda d: masks.global_sliding_window(
        d.rows, d.columns, d.window(), d.window(), d.window()
    ),
    "causal_blockwise": lambda d: masks.causal_blockwise(d.rows, d.columns, d.lengths(d.columns, 5)),
    "prefix_lm_document": _prefix_lm_document,
    "prefix_lm_causal": lambda d: masks.prefix_lm_causal(d.rows, d.columns, d.number(0, d.columns)),
    "qk_sparse": lambda d: masks.qk_sparse(d.rows, d.columns, d.flags(d.columns, 0.3)),
    "random_eviction": _random_eviction,
    "text_and_images": _packed(_text_and_images),
    "image_window": _packed(_image_window),
    "sound_window": _packed(_sound_window),
    "video_history": _packed(_video_history),
    "mixed": _packed(
        lambda d: _text_and_images(_Draw(d.rows, max(1, d.columns // 2), d.key_heads, d.generator)),
        lambda d: _image_window(_Draw(d.rows, max(1, d.columns // 2), d.key_heads, d.generator)),
        lambda d: _sound_window(_Draw(d.rows, max(1, d.columns // 2), d.key_heads, d.generator)),
        lambda d: _video_history(_Draw(d.rows, max(1, d.columns // 2), d.key_heads, d.generator)),
    ),
    "dynamic_window": _dynamic_window,
}
