"""Elasticity that changes in the course of training.

A full model that shares its weights with sub-models pays for it. Two ways to lower the price: let the
probabilities of reduced draws grow over the first part of training, when features form, or let them fall
over the last one, when the learning rate decays and weights settle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ernie5.backbone.config import ElasticConfig

Axis = Literal["depth", "width", "top_k"]
AXES: tuple[Axis, ...] = ("depth", "width", "top_k")


def elastic_share(step: int, steps: int, *, ramp: float = 0.0, calm: float = 0.0) -> float:
    """Factor in [0, 1] of the draws' probabilities at ``step`` of ``steps``.

    Args:
        ramp: share of the steps over which the factor rises from 0 to 1 at the start.
        calm: share of the steps over which it falls from 1 to 0 at the end.

    Raises:
        ValueError: a share outside [0, 1], or both together above 1.
    """
    if ramp < 0 or calm < 0 or ramp + calm > 1:
        raise ValueError(f"elastic ramp {ramp:g} and calm {calm:g} must be at least 0 and at most 1 together")
    done = step / steps
    share = 1.0
    if ramp:
        share = min(share, done / ramp)
    if calm:
        share = min(share, (1 - done) / calm)
    return max(share, 0.0)


def scaled(elastic: ElasticConfig, share: float, axes: Sequence[Axis] = AXES) -> ElasticConfig:
    """The same draws at ``share`` times their probabilities on these axes."""
    names = [f"{axis}_probability" for axis in axes]
    return elastic.model_copy(update={name: getattr(elastic, name) * share for name in names})
