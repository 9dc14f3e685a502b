"""The twelve published mask kinds (Wang et al., arXiv 2410.01359, figure 1) as masked row intervals.

Every builder returns int32 ``[1, M, Nk, K, 2]`` on the CPU, for :class:`MaskPlan`, in O(Nk). Query row i
stands at key position ``p = i + Nk - Nq``, so that the last row is the last column (aligned at the bottom
right, as in decoding with a cache). Where there are more rows than columns, the first ones have negative
positions: they lie before all documents.

``lengths`` are whole numbers (a sequence or a tensor) that divide the ``columns`` key positions into
consecutive parts. For a batch, build rows one by one and join them with :func:`batched`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Lengths = Sequence[int] | Tensor
# Positions as masked bounds: [start, end) of positions p that don't see a column; None is unbounded.
_Bound = Tensor | int | None


def full(rows: int, columns: int) -> Tensor:
    """Every row sees every column."""
    return masked(rows, columns, (0, 0))


def causal(rows: int, columns: int) -> Tensor:
    """Position p sees columns j <= p."""
    return masked(rows, columns, (None, _positions(columns)))


def sliding_window(rows: int, columns: int, left: int, right: int = 0) -> Tensor:
    """Position p sees columns p - left to p + right, both included; ``right=0`` is causal."""
    _require(left >= 0 and right >= 0, f"a window reaches 0 or more to each side, got ({left}, {right})")
    j = _positions(columns)
    return masked(rows, columns, (None, j - right), (j + left + 1, None))


def causal_document(rows: int, columns: int, lengths: Lengths) -> Tensor:
    """Packed documents; position p sees columns j <= p of its own document."""
    _, end = parts(columns, lengths)
    return masked(rows, columns, (None, _positions(columns)), (end, None))


def document(rows: int, columns: int, lengths: Lengths) -> Tensor:
    """Packed documents; position p sees all columns of its own document."""
    start, end = parts(columns, lengths)
    return masked(rows, columns, (None, start), (end, None))


def share_question(rows: int, columns: int, groups: Sequence[Sequence[int]]) -> Tensor:
    """Several answers to one question, as for DPO and reward models.

    Args:
        groups: lengths of (question, answer, answer, ...), group after group. All positions see causally what
            lies in their own part and, in answers, the question of their group.
    """
    _, part_end = parts(columns, [length for group in groups for length in group])
    _, group_end = parts(columns, [sum(group) for group in groups])
    in_question = parts_flags(columns, groups)
    end = torch.where(in_question, group_end, part_end)
    return masked(rows, columns, (None, _positions(columns)), (end, None))


def global_sliding_window(rows: int, columns: int, tokens: int, left: int, right: int) -> Tensor:
    """The first ``tokens`` columns are seen by all, positions p < ``tokens`` see all, the others see columns
    ``p - left`` to ``p + right``."""
    _require(
        tokens >= 0 and left >= 0 and right >= 0,
        f"global tokens and windows are 0 or more, got {tokens} and ({left}, {right})",
    )
    j = _positions(columns)
    before, after = (j - right).clamp(min=tokens), (j + left + 1).clamp(min=tokens)
    everywhere = j < tokens
    return masked(
        rows,
        columns,
        (torch.where(everywhere, 0, tokens), torch.where(everywhere, 0, before)),
        (torch.where(everywhere, columns, after), None),
    )


def causal_blockwise(rows: int, columns: int, lengths: Lengths) -> Tensor:
    """In-context examples: causal inside each block; the last block sees all blocks before it."""
    start, end = parts(columns, lengths)
    return masked(rows, columns, (None, _positions(columns)), (end, torch.maximum(end, start[-1])))


def prefix_lm_causal(rows: int, columns: int, prefix: int) -> Tensor:
    """The first ``prefix`` columns are seen by all positions, the others causally."""
    _require(0 <= prefix <= columns, f"a prefix lies within the {columns} columns, got {prefix}")
    j = _positions(columns)
    return masked(rows, columns, (None, torch.where(j < prefix, -rows, j)))


def prefix_lm_document(rows: int, columns: int, documents: Sequence[tuple[int, int]]) -> Tensor:
    """Packed documents of (prefix, rest) lengths: a document sees all of its prefix, the rest causally."""
    start, end = parts(columns, [prefix + rest for prefix, rest in documents])
    in_prefix = parts_flags(columns, documents)
    first = torch.where(in_prefix, start, _positions(columns))
    return masked(rows, columns, (None, first), (end, None))


def qk_sparse(rows: int, columns: int, dropped: Tensor) -> Tensor:
    """Causal without the dropped keys; bool ``[Nk]`` or ``[M, Nk]``.

    As in the published test suite, keys are dropped and no queries.
    """
    _require(dropped.shape[-1] == columns, f"dropped keys of {columns} columns, got {list(dropped.shape)}")
    j = _positions(columns)
    return masked(rows, columns, (None, torch.where(dropped.cpu(), columns, j)))


def random_eviction(rows: int, columns: int, evicted: Tensor) -> Tensor:
    """Causal attention over a cache that loses keys, per mask head.

    Args:
        evicted: whole numbers ``[M, Nk]``, the position from which on a key is gone; ``Nk`` or more keeps
            it. See :func:`random_evictions`.
    """
    _require(evicted.shape[-1] == columns, f"evictions of {columns} columns, got {list(evicted.shape)}")
    j = _positions(columns)
    return masked(rows, columns, (None, j), (torch.maximum(evicted.cpu(), j), None))


def random_evictions(columns: int, heads: int, first: int, generator: torch.Generator) -> Tensor:
    """For :func:`random_eviction`: each key goes at a random later position, none before ``first``.

    Int64 ``[heads, columns]``; uniform over what remains, the key's own position excepted.
    """
    j = _positions(columns)
    low = (j + 1).clamp(min=first)
    draws = torch.rand(heads, columns, generator=generator)
    return low + (draws * (columns + 1 - low).clamp(min=0)).long()


def batched(*masks: Tensor) -> Tensor:
    """Masks of equal M and Nk joined to ``[B, M, Nk, K, 2]`` with the greatest K; added slots are empty."""
    slots = max(mask.shape[3] for mask in masks)
    return torch.cat([F.pad(mask, (0, 0, 0, slots - mask.shape[3])) for mask in masks])


def masked(rows: int, columns: int, *intervals: tuple[_Bound, _Bound]) -> Tensor:
    """Intervals of masked positions, each bound ``[Nk]`` or ``[M, Nk]``, as rows ``[1, M, Nk, K, 2]``."""
    offset = columns - rows
    sides = []
    for start, end in intervals:
        low = torch.as_tensor(0 if start is None else start - offset).clamp(0, rows)
        high = torch.as_tensor(rows if end is None else end - offset).clamp(0, rows)
        sides += [low, torch.maximum(low, high)]
    heads = max([1, *(side.shape[0] for side in sides if side.dim() == 2)])
    stacked = torch.stack([side.int().expand(heads, columns) for side in sides], -1)
    return stacked.unflatten(-1, (-1, 2))[None].contiguous()


def parts(columns: int, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """First position and one past the last of the part that each position lies in, int64 ``[Nk]``.

    Raises:
        ValueError: a negative length, or lengths that do not sum up to ``columns``.
    """
    size = torch.as_tensor(lengths, dtype=torch.int64)
    _require(bool((size >= 0).all()), f"lengths are 0 or more, got {size.tolist()}")
    end = size.cumsum(0)
    total = int(end[-1]) if len(end) else 0
    _require(total == columns, f"the parts have {total} positions together, the mask has {columns} columns")
    return (end - size).repeat_interleave(size), end.repeat_interleave(size)


def parts_flags(columns: int, groups: Sequence[Sequence[int]]) -> Tensor:
    """Whether each position lies in the first part of its group, bool ``[Nk]``."""
    first = torch.tensor([index == 0 for group in groups for index, _ in enumerate(group)])
    size = torch.tensor([length for group in groups for length in group])
    return first.repeat_interleave(size)


def _positions(columns: int) -> Tensor:
    return torch.arange(columns)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
