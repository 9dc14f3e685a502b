"""Fixed sub-networks: which layers and experts answer when a request asks for less than the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.model.experts import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError


@dataclass(frozen=True)
class SubNetwork:
    """Layers that run (ascending), ascending expert ids per layer (None for all) and k."""

    layers: tuple[int, ...]
    experts: tuple[tuple[int, ...] | None, ...]
    top_k: int

    def routing(self) -> Routing:
        """Routing of a call that runs this sub-network."""
        return Routing(
            experts=[None if ids is None else torch.tensor(ids) for ids in self.experts],
            fixed_top_k=[self.top_k] * len(self.experts),
        )


def whole(config: BackboneConfig) -> SubNetwork:
    """All layers, all experts, the model's own k."""
    return SubNetwork(tuple(range(config.layers)), (None,) * config.layers, config.top_k)


def layer_count(config: BackboneConfig, depth: float | None) -> int:
    """Layers that a share of the depth keeps.

    Raises:
        InvalidInputError: fewer than the first layer and the top ``audio_layers``, which every answer needs.
    """
    if depth is None:
        return config.layers
    _check_share("depth", depth)
    count, least = round(depth * config.layers), len(config.kept_layers)
    if count < least:
        raise InvalidInputError(
            f"depth {depth:g} leaves {count} of {config.layers} layers; the first one and the top "
            f"{config.audio_layers} always run, so the least depth is {least / config.layers:g}",
            param="depth",
        )
    return count


def expert_count(config: BackboneConfig, width: float | None) -> int:
    """Experts a layer that a share of the width keeps.

    Raises:
        InvalidInputError: none would be left.
    """
    if width is None:
        return config.experts
    _check_share("width", width)
    count = round(width * config.experts)
    if count < 1:
        raise InvalidInputError(
            f"width {width:g} leaves none of {config.experts} experts; the least width is "
            f"{1 / config.experts:g}",
            param="width",
        )
    return count


def checked_top_k(config: BackboneConfig, top_k: int | None, active: int) -> int:
    """k of a sub-network with ``active`` experts; without ``top_k`` the model's own, or ``active`` if fewer.

    Raises:
        InvalidInputError: k above what the model was trained with or above the active experts, or a kind of
            position without any.
    """
    least = min(pool_counts(config, active))
    if least < 1:
        raise InvalidInputError(
            f"{active} experts leave none to some kinds of position; ask for a larger width", param="width"
        )
    if top_k is None:
        return min(config.top_k, least)
    if not 1 <= top_k <= config.top_k:
        raise InvalidInputError(
            f"{top_k} experts a token is outside [1, {config.top_k}], the range this model was trained in",
            param="experts_per_token",
        )
    if top_k > least:
        raise InvalidInputError(
            f"{top_k} experts a token, but only {least} of {config.experts} are active; "
            f"ask for at most {least}, or for a larger width",
            param="experts_per_token",
        )
    return top_k


def choose_subnetwork(
    model: Backbone, depth: float | None = None, width: float | None = None, top_k: int | None = None
) -> SubNetwork:
    """A sub-network of about ``depth`` of the layers, ``width`` of the experts and ``top_k`` experts a token.

    Needs no data: layers are dropped evenly between the first and the audio layers, which always stay, and
    experts are kept by demand: the balancing bias is lowest where the router would crowd without it. Where
    biases are equal, as when none was learnt, the first experts stay. Demand is a poor guide: in measurements
    experts chosen so kept no more than random ones (docs/elastic.md).
    :mod:`ernie5.backbone.elastic.importance` chooses by calibration data.

    Raises:
        InvalidInputError: a share outside (0, 1], no layer or expert left, k above the model's own or above
            the active experts.
    """
    config = model.config
    layers = evenly_spaced(config, layer_count(config, depth))
    active = expert_count(config, width)
    k = checked_top_k(config, top_k, active)
    demand = -torch.stack([model.feed_forward(index).selection_bias for index in range(config.layers)])
    return SubNetwork(layers, best_experts(config, demand, active), k)


def expert_pools(config: BackboneConfig) -> list[range]:
    """Experts that compete with one another: all of them, or those of each kind of position."""
    if config.router.pool == "shared":
        return [range(config.experts)]
    ends = np.cumsum(config.expert_shares).tolist()
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def pool_counts(config: BackboneConfig, active: int) -> list[int]:
    """How many of ``active`` experts each pool keeps: in proportion, the larger remainders first."""
    sizes = [len(pool) for pool in expert_pools(config)]
    exact = [size * active / config.experts for size in sizes]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda pool: counts[pool] - exact[pool])
    for pool in by_remainder[: active - sum(counts)]:
        counts[pool] += 1
    return counts


def best_experts(config: BackboneConfig, scores: Tensor, active: int) -> tuple[tuple[int, ...] | None, ...]:
    """Ascending ids of the ``active`` highest scores of each layer, ``[L, E]``; None where all stay."""
    if active == config.experts:
        return (None,) * config.layers
    kept = []
    for row in scores:
        ids: list[int] = []
        for pool, count in zip(expert_pools(config), pool_counts(config, active)):
            best = row[pool.start : pool.stop].argsort(descending=True, stable=True)[:count]
            ids += sorted((best + pool.start).tolist())
        kept.append(tuple(ids))
    return tuple(kept)


def evenly_spaced(config: BackboneConfig, count: int) -> tuple[int, ...]:
    """``count`` layers: those that always stay and evenly spaced ones between them."""
    others = droppable_layers(config)
    wanted = count - len(config.kept_layers)
    even = [others[int((i + 0.5) * len(others) / wanted)] for i in range(wanted)]
    return tuple(sorted({*config.kept_layers, *even}))


def droppable_layers(config: BackboneConfig) -> Sequence[int]:
    """Layers that may be left out: neither the first nor one with audio heads."""
    return [layer for layer in range(config.layers) if layer not in config.kept_layers]


def _check_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise InvalidInputError(f"{name} {share:g} is outside (0, 1]", param=name)
