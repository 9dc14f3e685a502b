"""What a step's routing adds up to, and what it does to the layers: selection biases and limits.

The sums are plain tensors, so that microbatches and data-parallel ranks add up to the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.execution import moved, on_host
from ernie5.backbone.model.allocation import BINS, limit_count
from ernie5.backbone.model.experts import SparseFeedForward
from ernie5.backbone.model.router import Routing


@dataclass
class RoutingSums:
    """Sums over the counted full-width tokens.

    Attributes:
        load: float32 ``[L, E]``, tokens an expert got.
        opened: float64 ``[L, 2]``, slots that tokens need under a dynamic allocation, and tokens.
        prices: int64 ``[L, G, bins]``, histograms of the slots' prices by the limit that decides about them.
    """

    load: Tensor
    opened: Tensor
    prices: Tensor

    @classmethod
    def of(
        cls,
        config: BackboneConfig,
        routings: Sequence[Routing] = (),
        device: torch.device | str | None = None,
    ) -> RoutingSums:
        """The sums of some calls, made on ``device``; of none, zeros."""
        sums = cls(
            torch.zeros(config.layers, config.experts, device=device),
            torch.zeros(config.layers, 2, dtype=torch.float64, device=device),
            torch.zeros(
                config.layers,
                limit_count(config.router.allocation),
                BINS,
                dtype=torch.int64,
                device=device,
            ),
        )
        for routing in routings:
            for total, parts in (
                (sums.load, routing.load),
                (sums.opened, routing.opened),
                (sums.prices, routing.prices),
            ):
                for layer, part in parts.items():
                    total[layer] += part
        return sums

    def add_(self, other: RoutingSums) -> RoutingSums:
        """Add another's sums in place."""
        self.load += other.load
        self.opened += other.opened
        self.prices += other.prices
        return self

    def on_host(self) -> RoutingSums:
        """The sums on the CPU, where :meth:`update` and the figures read them; waits for a GPU once."""
        return RoutingSums(*on_host(self.load, self.opened, self.prices))

    def update(self, config: BackboneConfig, layers: Sequence[SparseFeedForward]) -> None:
        """Move each layer's selection bias and limit; layers that no token passed stay as they are."""
        for index, layer in enumerate(layers):
            if self.load[index].any():
                layer.balance(moved(self.load[index], layer.selection_bias.device))
        self.hold_budget(config, layers)

    def hold_budget(
        self, config: BackboneConfig, layers: Sequence[SparseFeedForward], share: float | None = None
    ) -> None:
        """Move each layer's limits a ``share`` of the way (None: the configured one) to those that fit."""
        allocation = config.router.allocation
        if allocation.policy != "fixed":
            pooled = allocation.scope == "model"
            for index, layer in enumerate(layers):
                layer.hold_budget(self.prices.sum(0) if pooled else self.prices[index], share)

    def imbalance(self) -> float:
        """Load of the busiest expert over the mean, in the mean over layers."""
        return float((self.load.amax(-1) / self.load.mean(-1).clamp(min=1e-9)).mean())

    def experts_per_token(self) -> float | None:
        """Mean slots that tokens need, over layers and tokens; None where the number is fixed."""
        needed, tokens = self.opened.sum(0).tolist()
        return needed / tokens if tokens else None
