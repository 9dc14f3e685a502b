"""The one door to attention under a column-interval mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ernie5.kernels.flashmask.panels import panel_attention
from ernie5.kernels.flashmask.plan import MaskPlan
from ernie5.kernels.flashmask.reference import dense_attention


def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | None = None,
    *,
    causal: bool = False,
    plan: MaskPlan | None = None,
    softmax_scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention under a mask given as a plan or in Paddle's column form.

    Args:
        query: ``[B, Nq, H, D]``.
        key, value: ``[B, Nk, Hk, D]`` with H a multiple of Hk (grouped queries).
        startend_row_indices: int32 ``[B, 1 or Hk, Nk, 1 | 2 | 4]``, Paddle's FlashMask form; see
            :func:`intervals_from_startend`.
        causal: with ``startend_row_indices`` or no mask: hide later keys, aligned at the bottom right.
        plan: a prepared mask, instead of the two above.
        softmax_scale: default ``D ** -0.5``.
        backend: ``auto``, ``panels`` or ``reference``.

    Returns:
        ``[B, Nq, H, D]``; rows that see no key are 0.
    """
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")
    if plan is None:
        plan = MaskPlan.from_intervals(
            intervals_from_startend(startend_row_indices, query.shape[1], key, causal), query.shape[1]
        )
    elif startend_row_indices is not None or causal:
        raise ValueError("a plan is the whole mask: give either it, or startend_row_indices and causal")
    if plan.rows != query.shape[1] or plan.intervals.shape[2] != key.shape[1]:
        raise ValueError(
            f"the plan is for {plan.rows} rows and {plan.intervals.shape[2]} columns, the query has "
            f"{query.shape[1]} rows and the key {key.shape[1]} columns"
        )
    if backend == "auto":
        backend = "panels" if plan.intervals.shape[1] == 1 else "reference"
    if backend == "panels":
        return panel_attention(query, key, value, plan, softmax_scale)
    if backend == "reference":
        return dense_attention(query, key, value, plan, softmax_scale)
    raise ValueError(f"unknown backend {backend!r}; known: auto, panels, reference")


def intervals_from_startend(indices: Tensor | None, rows: int, key: Tensor, causal: bool) -> Tensor:
    """Masked row intervals ``[B, M, Nk, K, 2]`` of Paddle's ``startend_row_indices``.

    Per key column j the masked rows are: causal with 1 bound, rows >= s0; causal with 2, s0 <= row < s1;
    not causal with 2, row >= s0 or row < s1; not causal with 4, s0 <= row < s1 or s2 <= row < s3. Causal
    adds rows < j - (Nk - Nq).
    """
    columns, device = key.shape[1], key.device
    full = torch.full((), rows, dtype=torch.int32, device=device)
    zero = torch.zeros((), dtype=torch.int32, device=device)
    pairs: list[tuple[Tensor, Tensor]] = []
    shape = (key.shape[0], 1, columns) if indices is None else tuple(indices.shape[:3])
    if causal:
        diagonal = torch.arange(columns, dtype=torch.int32, device=device) - (columns - rows)
        pairs.append((zero, diagonal.clamp(0, rows)))
    if indices is not None:
        if indices.dtype != torch.int32:
            raise ValueError(f"startend_row_indices must be int32, got {indices.dtype}")
        bounds = indices.unbind(-1)
        match (causal, len(bounds)):
            case (True, 1):
                pairs.append((bounds[0], full))
            case (True, 2):
                pairs.append((bounds[0], bounds[1]))
            case (False, 2):
                pairs += [(zero, bounds[1]), (bounds[0], full)]
            case (False, 4):
                pairs += [(bounds[0], bounds[1]), (bounds[2], bounds[3])]
            case _:
                raise ValueError(
                    f"{len(bounds)} bounds with causal={causal} are not defined; causal takes 1 or 2, "
                    "otherwise 2 or 4"
                )
    if not pairs:
        pairs.append((zero, zero))
    stacked = [torch.stack((s.expand(shape), torch.maximum(s, e).expand(shape)), -1) for s, e in pairs]
    return torch.stack(stacked, -2).int()
