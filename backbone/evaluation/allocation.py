"""Do hard tokens get more experts? Rank correlation of experts a token with its loss, with an interval.

A token's number of experts is the mean over the layers of the slots that were on at the position that
predicts it. Tokens of one sample are not independent, so the interval comes from resampling samples (a
cluster bootstrap).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ernie5.backbone.elastic.subnetwork import SubNetwork
from ernie5.backbone.evaluation.routing import observe
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.complexity import position_losses
from ernie5.backbone.rows import RowBatch


@dataclass(frozen=True)
class TokenCosts:
    """Predictions of one modality, all ``[n]``: float32 ``loss`` in nats (the mean over the bits or levels of
    one position), float32 ``experts`` a token, int64 ``sample``."""

    loss: np.ndarray
    experts: np.ndarray
    sample: np.ndarray


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rho and its bootstrap interval."""

    rho: float
    low: float
    high: float
    tokens: int
    samples: int


def token_costs(
    model: Backbone, batches: Sequence[RowBatch], subnetwork: SubNetwork | None = None
) -> dict[str, TokenCosts]:
    """Loss and experts of every prediction on some rows, by modality; absent ones are left out."""
    found: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    first = 0
    for batch, outputs, routing, _ in observe(model, batches, subnetwork):
        counts = [(choices >= 0).sum(-1).float() for choices in routing.choices.values()]
        experts = torch.stack(counts).mean(0)
        sample = batch.sample.flatten() + first
        first += batch.samples
        for name, (at, loss) in position_losses(outputs, batch).items():
            part = (loss.numpy(), experts[at].numpy(), sample[at].numpy())
            found.setdefault(name, []).append(part)
    return {name: TokenCosts(*map(np.concatenate, zip(*parts))) for name, parts in found.items()}


def rank_correlation(
    costs: TokenCosts, *, draws: int = 1000, level: float = 0.95, seed: int = 0
) -> RankCorrelation:
    """Spearman's correlation of experts and loss, ties at their mean rank; interval by resampled samples.

    Raises:
        ValueError: fewer than two tokens or samples.
    """
    if len(costs.loss) < 2 or len(np.unique(costs.sample)) < 2:
        raise ValueError("a rank correlation needs two tokens from two samples at least")
    _, experts = np.unique(costs.experts, return_inverse=True)
    _, loss = np.unique(costs.loss, return_inverse=True)
    names, sample = np.unique(costs.sample, return_inverse=True)
    generator = np.random.default_rng(seed)
    drawn = np.empty(draws)
    for number in range(draws):
        often = np.bincount(generator.integers(0, len(names), len(names)), minlength=len(names))
        drawn[number] = _spearman(experts, loss, often[sample].astype(np.float64))
    low, high = np.nanquantile(drawn, ((1 - level) / 2, (1 + level) / 2))
    rho = _spearman(experts, loss, np.ones(len(loss)))
    return RankCorrelation(rho, float(low), float(high), len(loss), len(names))


def _spearman(one: np.ndarray, other: np.ndarray, weight: np.ndarray) -> float:
    """Spearman of two arrays of dense ranks, entry i ``weight[i]`` times; nan if one is constant."""
    a, b = _mean_ranks(one, weight), _mean_ranks(other, weight)
    total = weight.sum()
    a, b = a - (weight * a).sum() / total, b - (weight * b).sum() / total
    spread = np.sqrt((weight * a * a).sum() * (weight * b * b).sum())
    return float((weight * a * b).sum() / spread) if spread > 0 else float("nan")


def _mean_ranks(dense: np.ndarray, weight: np.ndarray) -> np.ndarray:
    count = np.bincount(dense, weights=weight)
    return (np.cumsum(count) - count / 2)[dense]
