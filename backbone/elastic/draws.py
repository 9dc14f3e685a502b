"""Random sub-networks for training (article section 1; ERNIE 5.0 report, section 3.3).

Depth is drawn once per packed row, so that the rows of one draw run together and skipped layers cost nothing;
width once per sample and layer, as a router mask; top_k once per sample and layer. All draws are functions
of a numpy generator, which the trainer seeds by step.
"""

from __future__ import annotations

import numpy as np
import torch

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.model.experts import Routing


def draw_layers(config: BackboneConfig, generator: np.random.Generator) -> tuple[int, ...]:
    """Layers that run for one row: all, or a random 30-70 % that keeps the first and the audio layers."""
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


def draw_routing(
    config: BackboneConfig, samples: int, generator: np.random.Generator
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``expert_mask`` bool ``[S, L, E]`` and ``top_k`` int64 ``[S, L]``; None where every sample is full."""
    elastic = config.elastic
    reduced = generator.random(samples) < elastic.width_probability
    share = generator.uniform(*elastic.width_range, size=samples)
    rank = generator.random((samples, config.layers, config.experts)).argsort(-1).argsort(-1)
    # Never fewer experts than top_k, so that a reduced sample still fills its slots.
    count = np.maximum(np.round(share * config.experts), config.top_k)
    count = np.where(reduced, count, config.experts)
    mask = rank < count[:, None, None]
    sparse = generator.random((samples, config.layers)) < elastic.top_k_probability
    fewer = generator.integers(1, max(config.top_k, 2), size=(samples, config.layers))
    top_k = np.where(sparse, np.minimum(fewer, config.top_k), config.top_k)
    return (
        torch.from_numpy(mask) if reduced.any() else None,
        torch.from_numpy(top_k.astype(np.int64)) if (top_k < config.top_k).any() else None,
    )


def routing_for(
    config: BackboneConfig,
    sample: torch.Tensor,
    samples: int,
    counted: torch.Tensor,
    generator: np.random.Generator,
) -> Routing:
    """A training step's routing with fresh width and top_k draws; ``sample`` int64 ``[T]``."""
    expert_mask, top_k = draw_routing(config, samples, generator)
    return Routing(expert_mask=expert_mask, top_k=top_k, sample=sample, counted=counted)
