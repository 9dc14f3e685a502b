"""The plain reference: attention with the mask made dense. For tests and tiny inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ernie5.kernels.flashmask.plan import MaskPlan
from ernie5.kernels.flashmask.visible import PairScores, VisibleSum


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention by definition; O(Nq * Nk) memory.

    Computed in float64 for float64 inputs and in float32 for all others; autograd goes through both results,
    in either mode. A hidden pair adds nothing, even where key, value or query are not finite.

    Args:
        query: ``[B, Nq, H, D]``.
        key, value: ``[B, Nk, Hk, D]``, H a multiple of Hk.
        plan: for B rows or for one that all share; 1 or Hk mask heads.
        softmax_scale: default ``D ** -0.5``.

    Returns:
        ``[B, Nq, H, D]`` in the inputs' dtype, 0 for rows that see nothing, and the log-sum-exp of the
        scaled scores, float32 ``[B, H, Nq]``, -inf for those rows.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups = query.shape[2] // key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (t.transpose(1, 2).to(dtype) for t in (query, key, value))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    visible = plan.dense()
    if plan.heads > 1:
        visible = visible.repeat_interleave(groups, 1)
    visible = visible.expand(query.shape[0], q.shape[1], -1, -1)
    seen = visible.any(-1, keepdim=True)
    scores = (PairScores.apply(q, k, visible) * scale).masked_fill(~visible, float("-inf"))
    # Rows that see nothing get scores of 0, so that softmax stays finite; the sum leaves all of them out.
    scores = scores.masked_fill(~seen, 0.0)
    out = VisibleSum.apply(torch.softmax(scores, -1), v, visible)
    lse = scores.logsumexp(-1).masked_fill(~seen[..., 0], float("-inf"))
    return out.transpose(1, 2).to(query.dtype), lse.float()
