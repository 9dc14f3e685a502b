"""Where tokens go: expert use by kind of position and layer (ERNIE 5.0 report, section 6.4.1).

Measured on packed rows of calibration samples, without training. The figures are those of the report: use of
each expert, overlap (intersection over union) of the most used quarter between kinds, normalised entropy; and
beside them dead experts, the busiest expert's load and experts a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.elastic.subnetwork import SubNetwork
from ernie5.backbone.layout import SampleLayout
from ernie5.backbone.model.router import Routing
from ernie5.backbone.model.transformer import Backbone, Outputs
from ernie5.backbone.rows import GROUPS, RowBatch, pack


@dataclass(frozen=True)
class RoutingTable:
    """How often each expert was chosen.

    Attributes:
        use: int64 ``[G, L, E]``: tokens of each kind that each expert got.
        tokens: int64 ``[G]``: tokens of each kind.
        groups: names of the kinds.
        layers: those that ran; rows of the others are 0.
    """

    use: np.ndarray
    tokens: np.ndarray
    groups: tuple[str, ...]
    layers: tuple[int, ...]

    @property
    def share(self) -> np.ndarray:
        """float64 ``[G, L, E]``: each expert's share of a kind's choices in a layer."""
        return self.use / np.maximum(self.use.sum(-1, keepdims=True), 1)

    def entropy(self) -> np.ndarray:
        """float64 ``[G, L]``: -sum p log p / log E, 1 if all experts are used alike; nan without tokens."""
        share = self.share
        terms = np.where(share > 0, share * np.log(np.maximum(share, 1e-300)), 0.0)
        value = -terms.sum(-1) / np.log(max(share.shape[-1], 2))
        return np.where(self.use.sum(-1) > 0, value, np.nan)

    def overlap(self, top: float = 0.25) -> np.ndarray:
        """float64 ``[L, G, G]``: intersection over union of two kinds' most used experts.

        A kind's set is the ``top`` share of all experts that it uses most, without those it never uses; nan
        where a kind has no tokens.
        """
        kinds, layers, experts = self.use.shape
        count = max(1, round(top * experts))
        best = np.zeros(self.use.shape, bool)
        order = np.argsort(-self.use, axis=-1, kind="stable")[..., :count]
        np.put_along_axis(best, order, True, axis=-1)
        best &= self.use > 0
        result = np.full((layers, kinds, kinds), np.nan)
        for one in range(kinds):
            for other in range(kinds):
                both = (best[one] & best[other]).sum(-1)
                either = (best[one] | best[other]).sum(-1)
                here = (self.use[one].sum(-1) > 0) & (self.use[other].sum(-1) > 0)
                result[:, one, other] = np.where(here, both / np.maximum(either, 1), np.nan)
        return result

    def dead(self) -> np.ndarray:
        """int64 ``[L]``: experts that no token of any kind chose; all of them in a layer that did not run."""
        return (self.use.sum(0) == 0).sum(-1)

    def busiest(self) -> np.ndarray:
        """float64 ``[L]``: load of the most used expert over the mean; nan in a layer that did not run."""
        load = self.use.sum(0)
        mean = load.mean(-1)
        return np.where(mean > 0, load.max(-1) / np.maximum(mean, 1e-9), np.nan)

    def experts_per_token(self) -> np.ndarray:
        """float64 ``[G, L]``: mean number of experts; nan for a kind without tokens."""
        count = self.tokens[:, None]
        return np.where(count > 0, self.use.sum(-1) / np.maximum(count, 1), np.nan)

    def as_json(self) -> dict[str, Any]:
        """Everything above, nan as None."""

        def plain(values: np.ndarray) -> Any:
            rounded = np.round(values, 4).astype(object)
            rounded[np.isnan(values)] = None
            return rounded.tolist()

        return {
            "groups": list(self.groups),
            "layers": list(self.layers),
            "tokens": self.tokens.tolist(),
            "use": self.use.tolist(),
            "entropy": plain(self.entropy()),
            "overlap": plain(self.overlap()),
            "dead": self.dead().tolist(),
            "busiest": plain(self.busiest()),
            "experts_per_token": plain(self.experts_per_token()),
        }


def calibration_rows(
    layouts: Iterable[SampleLayout], config: BackboneConfig, *, length: int = 1024
) -> list[RowBatch]:
    """One batch of one row each for as many rows as the samples need, in order; those beyond ``length`` are
    left out."""
    rows: list[list[SampleLayout]] = []
    free = 0
    for layout in layouts:
        if len(layout) > length:
            continue
        if len(layout) > free:
            rows.append([])
            free = length
        rows[-1].append(layout)
        free -= len(layout)
    return [pack([row], length, config) for row in rows]


def observe(
    model: Backbone, batches: Iterable[RowBatch], subnetwork: SubNetwork | None = None
) -> Iterator[tuple[RowBatch, Outputs, Routing, Tensor]]:
    """Run batches without training: each with its outputs, the choices of its routing, and bool ``[B * N]``
    that is False for padding."""
    for batch in batches:
        routing = Routing() if subnetwork is None else subnetwork.routing()
        routing.group, routing.keep_choices = batch.group.flatten(), True
        layers = None if subnetwork is None else subnetwork.layers
        with torch.inference_mode():
            outputs = model(batch, layers=layers, routing=routing)
        yield batch, outputs, routing, batch.real()


def routing_table(
    model: Backbone, batches: Sequence[RowBatch], subnetwork: SubNetwork | None = None
) -> RoutingTable:
    """Count the choices of a model, or of a sub-network of it, on some rows."""
    config = model.config
    use = np.zeros((len(GROUPS), config.layers, config.experts), np.int64)
    tokens = np.zeros(len(GROUPS), np.int64)
    layers: tuple[int, ...] = ()
    for batch, _, routing, real in observe(model, batches, subnetwork):
        group = batch.group.flatten()
        layers = tuple(sorted(routing.choices))
        for number in range(len(GROUPS)):
            here = real & (group == number)
            tokens[number] += int(here.sum())
            for layer, choices in routing.choices.items():
                chosen = choices[here].flatten()
                counts = torch.bincount(chosen[chosen >= 0], minlength=config.experts)
                use[number, layer] += counts.numpy()
    return RoutingTable(use, tokens, GROUPS, layers)
