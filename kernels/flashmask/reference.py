"""The plain reference: attention with the mask made dense. For tests and tiny inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ernie5.kernels.flashmask.plan import MaskPlan


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, softmax_scale: float | None = None
) -> Tensor:
    """Attention by definition, in the inputs' dtype. ``[B, S, H, D]`` in and out; O(N^2) memory."""
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups = query.shape[2] // key.shape[2]
    q = query.transpose(1, 2)
    k = key.transpose(1, 2).repeat_interleave(groups, 1)
    v = value.transpose(1, 2).repeat_interleave(groups, 1)
    visible = plan.dense()
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    seen = visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen, 0.0)
    return (weights @ v).transpose(1, 2)
