"""Sums over visible pairs alone, whatever stands in the hidden ones.

A weight of 0 does not hide a number that is not finite: 0 times NaN is NaN. Here such numbers are taken out
of the product, and the sums that see one become NaN afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def visible_sum(weights: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """``sum_j weights[i, j] * values[j]`` over the visible pairs.

    Args:
        weights: ``[..., I, J]``; what they are in hidden pairs does not matter.
        values: ``[..., J, D]``.
        visible: bool, broadcast against ``weights``; None where all is.

    Returns:
        ``[..., I, D]``; NaN where a row sees a value that is not finite, and nowhere else for its sake.
    """
    if visible is None:
        return weights @ values
    finite = torch.isfinite(values)
    sums = weights.masked_fill(~visible, 0.0) @ values.masked_fill(~finite, 0.0)
    return sums.masked_fill(visible.to(values.dtype) @ (~finite).to(values.dtype) > 0, float("nan"))


class VisibleSum(Function):
    """:func:`visible_sum`, differentiable in weights and values, as often as wanted and in either mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        return visible_sum(weights, values, visible)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, values, visible = ctx.saved_tensors
        grad_weights = (grad @ values.transpose(-1, -2)).masked_fill(~visible, 0.0)
        return grad_weights, _transposed_sum(weights, grad, visible), None

    @staticmethod
    def jvp(ctx: Any, weights_tangent: Tensor | None, values_tangent: Tensor | None, _: None) -> Tensor:
        weights, values, visible = ctx.saved_tensors
        out = weights.new_zeros((*weights.shape[:-1], values.shape[-1]))
        if weights_tangent is not None:
            out = out + VisibleSum.apply(weights_tangent, values, visible)
        if values_tangent is not None:
            out = out + VisibleSum.apply(weights, values_tangent, visible)
        return out


class PairScores(Function):
    """``query[i] . key[j]`` of all pairs, ``[..., I, J]``; gradients of visible pairs alone are passed on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        query, key, visible = ctx.saved_tensors
        return VisibleSum.apply(grad, key, visible), _transposed_sum(grad, query, visible), None

    @staticmethod
    def jvp(ctx: Any, query_tangent: Tensor | None, key_tangent: Tensor | None, _: None) -> Tensor:
        query, key, visible = ctx.saved_tensors
        out = query.new_zeros((*query.shape[:-1], key.shape[-2]))
        if query_tangent is not None:
            out = out + PairScores.apply(query_tangent, key, visible)
        if key_tangent is not None:
            out = out + PairScores.apply(query, key_tangent, visible)
        return out


def _transposed_sum(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    return VisibleSum.apply(weights.transpose(-1, -2), values, visible.transpose(-1, -2))
