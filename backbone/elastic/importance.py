"""Importance of layers and experts, measured on calibration data.

Layers: greedy removal. In each round the layer whose absence raises the loss least goes; the first layer and
the top ones with audio heads stay. Experts, layer by layer: what they do at the positions that predict
something, each modality counting the same, whatever its share of positions. Random orders are the control.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.elastic.calibration import measure_loss, routing_of
from ernie5.backbone.elastic.subnetwork import (
    SubNetwork,
    best_experts,
    checked_top_k,
    droppable_layers,
    expert_count,
    layer_count,
    whole,
)
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.next_group import MODALITIES
from ernie5.backbone.rows import RowBatch

# usage: tokens that chose the expert. weight: the sum of its combine weights. output: of combine weight times
# the norm of what the expert puts out.
ExpertScore = Literal["usage", "weight", "output"]
EXPERT_SCORES: tuple[ExpertScore, ...] = get_args(ExpertScore)
DEFAULT_SCORE: ExpertScore = "output"

Progress = Callable[[], None]


def _ignore() -> None:
    pass


@dataclass(frozen=True)
class LayerRanking:
    """``dropped`` layers from the least important on, and the calibration ``loss`` after each removal."""

    dropped: tuple[int, ...]
    loss: tuple[float, ...]

    def keep(self, config: BackboneConfig, count: int) -> tuple[int, ...]:
        """The ``count`` layers that stay, ascending."""
        gone = set(self.dropped[: config.layers - count])
        return tuple(layer for layer in range(config.layers) if layer not in gone)


def rank_layers(
    model: Backbone,
    batches: Sequence[RowBatch],
    *,
    drops: int | None = None,
    top_k: int | None = None,
    on_pass: Progress = _ignore,
) -> LayerRanking:
    """Drop layers greedily, ``drops`` of them (all that may be, by default), at ``top_k`` experts a token.

    Takes :func:`ranking_passes` passes over the batches; ``on_pass`` is called after each.
    """
    config = model.config
    full = whole(config)
    layers = list(full.layers)
    candidates = list(droppable_layers(config))
    dropped: list[int] = []
    losses: list[float] = []
    for _ in range(len(candidates) if drops is None else drops):
        trials = []
        for candidate in candidates:
            rest = tuple(layer for layer in layers if layer != candidate)
            loss = measure_loss(model, batches, SubNetwork(rest, full.experts, top_k or config.top_k)).total
            trials.append((loss, candidate))
            on_pass()
        loss, least = min(trials)
        layers.remove(least)
        candidates.remove(least)
        dropped.append(least)
        losses.append(loss)
    return LayerRanking(tuple(dropped), tuple(losses))


def ranking_passes(config: BackboneConfig, drops: int | None = None) -> int:
    """Passes over the data that :func:`rank_layers` takes."""
    count = len(droppable_layers(config))
    return sum(count - done for done in range(count if drops is None else drops))


def random_layers(config: BackboneConfig, seed: int) -> LayerRanking:
    """The control: droppable layers in random order, without losses."""
    order = np.random.default_rng(seed).permutation(droppable_layers(config))
    return LayerRanking(tuple(order.tolist()), ())


@torch.inference_mode()
def score_experts(
    model: Backbone,
    batches: Sequence[RowBatch],
    score: ExpertScore = DEFAULT_SCORE,
    *,
    layers: Sequence[int] | None = None,
    top_k: int | None = None,
) -> Tensor:
    """float64 ``[L, E]``, larger is more important: one pass over the data through ``layers`` at ``top_k``.

    Only positions that predict count. A layer's scores are summed over modalities after dividing each by its
    total, for the loss weighs modalities alike; text would outvote the others by its number of positions.
    Layers that don't run score 0.
    """
    config = model.config
    full = whole(config)
    subnetwork = SubNetwork(
        full.layers if layers is None else tuple(layers), full.experts, top_k or config.top_k
    )
    scores = torch.zeros(len(MODALITIES), config.layers, config.experts, dtype=torch.float64)
    positions: Sequence[Tensor] = ()

    def record(
        layer: int, x_Td: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, valid_Tk: Tensor | None
    ) -> None:
        for modality, at in enumerate(positions):
            expert, weight = expert_Tk[at], weight_Tk[at]
            if score == "usage":
                value = torch.ones_like(weight)
            elif score == "weight":
                value = weight
            else:
                value = weight * _output_norms(model, layer, x_Td[at], expert)
            if valid_Tk is not None:
                value = value * valid_Tk[at]
            scores[modality, layer].index_add_(0, expert.flatten(), value.flatten().double())

    with _recording(model, record):
        for batch in batches:
            positions = (batch.text_at, batch.bits_at, batch.audio_at)
            model(batch, layers=subnetwork.layers, routing=routing_of(model, batch, subnetwork))
    return (scores / scores.sum(-1, keepdim=True).clamp(min=1e-12)).sum(0)


def random_experts(config: BackboneConfig, seed: int) -> Tensor:
    """The control: random scores ``[L, E]``."""
    values = np.random.default_rng(seed).random((config.layers, config.experts))
    return torch.from_numpy(values)


def select_subnetwork(
    model: Backbone,
    batches: Sequence[RowBatch],
    *,
    depth: float | None = None,
    width: float | None = None,
    top_k: int | None = None,
    score: ExpertScore = DEFAULT_SCORE,
    on_pass: Progress = _ignore,
) -> SubNetwork:
    """The sub-network that calibration data find most important.

    Layers are dropped one by one at the wanted k; then experts are scored in the network that is left, since
    routing changes with what runs before it. Takes :func:`selection_passes` passes over the data.

    Raises:
        InvalidInputError: see :func:`~ernie5.backbone.elastic.subnetwork.choose_subnetwork`.
    """
    config = model.config
    count = layer_count(config, depth)
    active = expert_count(config, width)
    k = checked_top_k(config, top_k, active)
    ranking = rank_layers(model, batches, drops=config.layers - count, top_k=k, on_pass=on_pass)
    layers = ranking.keep(config, count)
    if active == config.experts:
        return SubNetwork(layers, (None,) * config.layers, k)
    scores = score_experts(model, batches, score, layers=layers, top_k=k)
    on_pass()
    return SubNetwork(layers, best_experts(config, scores, active), k)


def selection_passes(config: BackboneConfig, depth: float | None, width: float | None) -> int:
    """Passes over the data that :func:`select_subnetwork` takes."""
    drops = config.layers - layer_count(config, depth)
    return ranking_passes(config, drops) + (expert_count(config, width) < config.experts)


Record = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], None]


@contextmanager
def _recording(model: Backbone, record: Record) -> Iterator[None]:
    """Show every layer's tokens, chosen experts and combine weights to ``record`` meanwhile."""

    def recorded(layer: int, mix: Callable[..., Tensor], *args: Tensor) -> Tensor:
        record(layer, *args)  # type: ignore[call-arg]
        return mix(*args)

    layers = range(model.config.layers)
    for layer in layers:
        feed_forward = model.feed_forward(layer)
        feed_forward.__dict__["mix"] = partial(recorded, layer, feed_forward.mix)
    try:
        yield
    finally:
        for layer in layers:
            del model.feed_forward(layer).__dict__["mix"]


def _output_norms(model: Backbone, layer: int, x_Td: Tensor, expert_Tk: Tensor) -> Tensor:
    """Euclidean norm of each chosen expert's output, float32 ``[T, k]``."""
    feed_forward = model.feed_forward(layer)
    norms = torch.zeros(expert_Tk.shape)
    for expert in expert_Tk.unique().tolist():
        token, slot = (expert_Tk == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_Td[token], feed_forward.gate_up[expert].to(x_Td.dtype)).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, feed_forward.down[expert].to(x_Td.dtype))
        norms[token, slot] = out.float().norm(dim=-1)
    return norms
