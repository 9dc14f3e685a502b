"""The twelve published masks twice: as masked intervals for FlashMask and as a predicate for FlexAttention.

The predicates are what a user of FlexAttention would write: integer comparisons and small captured vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ernie5.kernels.flashmask import masks

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GpuMask:
    """One mask for ``length`` rows and columns.

    Attributes:
        intervals: makes int32 ``[1, M, length, K, 2]``, on the CPU.
        predicate: of (batch, query head, query, key), on the device; None where all is visible.
    """

    name: str
    intervals: Callable[[], Tensor]
    predicate: Predicate | None


def lengths(total: int, parts: int, seed: int) -> list[int]:
    """``parts`` positive lengths that sum up to ``total``."""
    generator = torch.Generator().manual_seed(seed)
    cuts = (torch.randperm(total - 1, generator=generator)[: parts - 1] + 1).sort().values.tolist()
    edges = [0, *cuts, total]
    return [end - start for start, end in pairwise(edges)]


def gpu_masks(length: int, key_heads: int, group: int, device: torch.device | str) -> list[GpuMask]:
    """All twelve, in the order of the paper; documents are about an eighth of the row each."""
    parts = lengths(length, 8, seed=1)
    groups = [lengths(size, 4, seed=2) if size >= 8 else [size] for size in lengths(length, 4, seed=3)]
    prefixes = [(size // 3, size - size // 3) for size in parts]
    window, tokens, prefix = max(1, length // 16), max(1, length // 32), length // 3
    generator = torch.Generator().manual_seed(4)
    dropped = torch.rand(length, generator=generator) < 0.3
    evicted = masks.random_evictions(length, key_heads, length // 4, generator)

    document = _numbers(parts).to(device)
    answer = _numbers([size for sizes in groups for size in sizes]).to(device)
    question_group = _numbers([sum(sizes) for sizes in groups]).to(device)
    in_question = masks.parts_flags(length, groups).to(device)
    in_prefix = masks.parts_flags(length, prefixes).to(device)
    dropped_there, evicted_there = dropped.to(device), evicted.int().to(device)
    last = len(parts) - 1

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= window)

    def causal_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[q] == document[k])

    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return document[q] == document[k]

    def share_question(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        shared = in_question[k] & (question_group[q] == question_group[k])
        return (q >= k) & ((answer[q] == answer[k]) | shared)

    def global_sliding(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < tokens) | (q < tokens) | ((q - k <= window) & (k - q <= window))

    def causal_blockwise(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((document[q] == document[k]) | (document[q] == last))

    def prefix_lm_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (in_prefix[k] | (q >= k))

    def prefix_lm_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < prefix) | (q >= k)

    def qk_sparse(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ~dropped_there[k]

    def random_eviction(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < evicted_there[h // group, k])

    n = length
    return [
        GpuMask("full", lambda: masks.full(n, n), None),
        GpuMask("causal", lambda: masks.causal(n, n), causal),
        GpuMask("sliding_window", lambda: masks.sliding_window(n, n, window), sliding),
        GpuMask("causal_document", lambda: masks.causal_document(n, n, parts), causal_document),
        GpuMask("document", lambda: masks.document(n, n, parts), same_document),
        GpuMask("share_question", lambda: masks.share_question(n, n, groups), share_question),
        GpuMask(
            "global_sliding_window",
            lambda: masks.global_sliding_window(n, n, tokens, window, window),
            global_sliding,
        ),
        GpuMask("causal_blockwise", lambda: masks.causal_blockwise(n, n, parts), causal_blockwise),
        GpuMask("prefix_lm_document", lambda: masks.prefix_lm_document(n, n, prefixes), prefix_lm_document),
        GpuMask("prefix_lm_causal", lambda: masks.prefix_lm_causal(n, n, prefix), prefix_lm_causal),
        GpuMask("qk_sparse", lambda: masks.qk_sparse(n, n, dropped), qk_sparse),
        GpuMask("random_eviction", lambda: masks.random_eviction(n, n, evicted), random_eviction),
    ]


def document_lengths(length: int) -> list[int]:
    """Lengths of the documents of the masks above, for kernels that take packed sequences."""
    return lengths(length, 8, seed=1)


def _numbers(sizes: Sequence[int]) -> Tensor:
    """The number of the part that each position lies in, int32."""
    return torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
