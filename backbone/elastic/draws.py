"""Random sub-networks for training (article section 1; ERNIE 5.0 report, section 3.3).

Depth is drawn for a packed row, so that the rows of one draw run together and skipped layers cost nothing;
width for a sample and layer, as a router mask; top_k for a sample and layer. Each may be drawn for the whole
step instead. All draws are functions of a numpy generator, which the trainer seeds by step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.model.router import Routing, round_robin_share


def draw_layers(config: BackboneConfig, generator: np.random.Generator) -> tuple[int, ...]:
    """Layers that run: all, or a share within ``depth_range`` that keeps the first and the audio layers."""
    everything = tuple(range(config.layers))
    if generator.random() >= config.elastic.depth_probability:
        return everything
    low, high = config.elastic.depth_range
    kept = config.kept_layers
    count = round(generator.uniform(low, high) * config.layers)
    count = min(max(count, len(kept)), config.layers)
    others = [layer for layer in everything if layer not in kept]
    chosen = generator.permutation(others)[: count - len(kept)].tolist()
    return tuple(sorted([*kept, *chosen]))


def draw_width(config: BackboneConfig, samples: int, generator: np.random.Generator) -> Tensor | None:
    """``expert_mask`` bool ``[S, L, E]`` of independent draws; None where every sample keeps all experts.

    In an isolated pool each kind of position keeps its share of the experts. Never fewer experts than
    top_k, so that a reduced sample still fills its slots.
    """
    elastic = config.elastic
    reduced = generator.random(samples) < elastic.width_probability
    share = generator.uniform(*elastic.width_range, size=samples)
    order = generator.random((samples, config.layers, config.experts))
    shares = config.expert_shares if config.router.pool == "isolated" else (config.experts,)
    parts = []
    for own, size in zip(np.split(order, np.cumsum(shares)[:-1], axis=-1), shares):
        rank = own.argsort(-1).argsort(-1)
        count = np.where(reduced, np.maximum(np.round(share * size), config.top_k), size)
        parts.append(rank < count[:, None, None])
    return torch.from_numpy(np.concatenate(parts, -1)) if reduced.any() else None


def draw_top_k(config: BackboneConfig, samples: int, generator: np.random.Generator) -> Tensor | None:
    """``top_k`` int64 ``[S, L]`` of independent draws; None where none is reduced."""
    elastic = config.elastic
    low, high = elastic.top_k_range or (1, config.top_k - 1)
    layers = config.layers if elastic.top_k_scope == "layer" else 1
    sparse = generator.random((samples, layers)) < elastic.top_k_probability
    fewer = generator.integers(low, max(high, low) + 1, size=(samples, layers))
    top_k = np.where(sparse, np.minimum(fewer, config.top_k), config.top_k)
    if not (top_k < config.top_k).any():
        return None
    return torch.from_numpy(np.broadcast_to(top_k, (samples, config.layers)).astype(np.int64))


def draw_routing(
    config: BackboneConfig, samples: int, generator: np.random.Generator
) -> tuple[Tensor | None, Tensor | None]:
    """Width and top_k draws of ``samples`` samples, see :func:`draw_width` and :func:`draw_top_k`."""
    return draw_width(config, samples, generator), draw_top_k(config, samples, generator)


class StepDraws:
    """The draws of one training step: what the step shares is drawn at once, the rest when asked for."""

    def __init__(self, config: BackboneConfig, generator: np.random.Generator, step: int = 0) -> None:
        self.config, self.generator, self.step = config, generator, step
        elastic = config.elastic
        self._layers = draw_layers(config, generator) if elastic.depth_scope == "batch" else None
        self._width = draw_width(config, 1, generator) if elastic.width_scope == "batch" else None
        self._top_k = draw_top_k(config, 1, generator) if elastic.top_k_scope == "batch" else None

    def layers(self) -> tuple[int, ...]:
        """Layers of the next packed row."""
        return draw_layers(self.config, self.generator) if self._layers is None else self._layers

    def routing(self, sample: Tensor, samples: int, counted: Tensor, group: Tensor | None = None) -> Routing:
        """Routing of some rows.

        Args:
            sample: int64 ``[T]``, each token's sample, of ``samples``.
            counted: bool ``[T]``, False for padding.
            group: ``[T]``, each token's kind of position.
        """
        config, elastic = self.config, self.config.elastic
        if elastic.width_scope == "batch":
            mask = self._width
            expert_mask = None if mask is None else mask.expand(samples, *mask.shape[1:])
        else:
            expert_mask = draw_width(config, samples, self.generator)
        if elastic.top_k_scope == "batch":
            top_k = None if self._top_k is None else self._top_k.expand(samples, config.layers)
        else:
            top_k = draw_top_k(config, samples, self.generator)
        return Routing(
            expert_mask=expert_mask,
            top_k=top_k,
            sample=sample,
            group=group,
            round_robin=round_robin_share(self.step, config.router.round_robin_steps),
            turn=self.step,
            counted=counted,
        )
