"""Fixed sub-networks: which layers and experts answer when a request asks for less than the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ernie5.backbone.model.experts import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError


@dataclass(frozen=True)
class SubNetwork:
    """Layers that run (ascending), expert ids per layer (None for all) and k."""

    layers: tuple[int, ...]
    experts: tuple[tuple[int, ...] | None, ...]
    top_k: int

    def routing(self) -> Routing:
        """Routing of a call that runs this sub-network."""
        return Routing(
            experts=[None if ids is None else torch.tensor(ids) for ids in self.experts],
            fixed_top_k=[self.top_k] * len(self.experts),
        )


def choose_subnetwork(
    model: Backbone, depth: float | None = None, width: float | None = None, top_k: int | None = None
) -> SubNetwork:
    """A sub-network of about ``depth`` of the layers, ``width`` of the experts and ``top_k`` experts a token.

    Layers are dropped evenly between the first and the audio layers, which always stay. Experts are kept
    by demand: the balancing bias is lowest where the router would crowd without it.

    Raises:
        InvalidInputError: a share outside (0, 1], or k above the model's own.
    """
    config = model.config
    for name, share in (("depth", depth), ("width", width)):
        if share is not None and not 0 < share <= 1:
            raise InvalidInputError(f"{name} {share} is outside (0, 1]", param=name)
    k = config.top_k if top_k is None else top_k
    if not 1 <= k <= config.top_k:
        raise InvalidInputError(
            f"{k} experts a token is outside [1, {config.top_k}], the range this model was trained in",
            param="experts_per_token",
        )
    layers = tuple(range(config.layers))
    if depth is not None and depth < 1:
        kept = config.kept_layers
        others = [layer for layer in layers if layer not in kept]
        count = min(max(round(depth * config.layers) - len(kept), 0), len(others))
        even = [others[int((i + 0.5) * len(others) / count)] for i in range(count)]
        layers = tuple(sorted({*kept, *even}))
    experts: list[tuple[int, ...] | None] = [None] * config.layers
    if width is not None and width < 1:
        count = max(round(width * config.experts), k)
        for index in range(config.layers):
            ids = model.feed_forward(index).selection_bias.argsort(stable=True)[:count]
            experts[index] = tuple(sorted(ids.tolist()))
    return SubNetwork(layers, tuple(experts), k)
