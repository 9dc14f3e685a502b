"""The budget of a dynamic allocation on samples that were not trained on.

The controller fits the limits to what training sees. Samples that come back epoch after epoch are no longer
like new ones: the router and the guesses of difficulty know them, and limits that fit them open another
number of experts on what is new. A pass over a few samples that were held back mends that without training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ernie5.backbone.model.balance import RoutingSums
from ernie5.backbone.model.router import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import RowBatch
from ernie5.protocol.errors import InvalidInputError


def fit_budget(model: Backbone, batches: Sequence[RowBatch], *, rounds: int = 3) -> None:
    """Set the limits of a dynamic allocation so that these rows get the budget in the mean.

    Limits of kinds of position that do not occur stay. A layer's limits change what later layers see, so it
    takes several ``rounds`` over the rows.

    Raises:
        InvalidInputError: every token gets equally many experts, or there are no rows.
    """
    config = model.config
    if config.router.allocation.policy == "fixed":
        raise InvalidInputError(
            f"{config.name} gives every token {config.top_k} experts: there is no budget to fit",
            param="allocation",
        )
    if not batches:
        raise InvalidInputError("no samples to fit the budget to", param="samples")
    layers = [model.feed_forward(index) for index in range(config.layers)]
    for _ in range(rounds):
        _sums(model, batches).hold_budget(config, layers, 1.0)


def mean_experts(model: Backbone, batches: Sequence[RowBatch]) -> float | None:
    """Experts a token in the mean over layers and rows, as in answering; None where the number is fixed."""
    return _sums(model, batches).experts_per_token()


def _sums(model: Backbone, batches: Sequence[RowBatch]) -> RoutingSums:
    """What the routing of some rows adds up to, as in answering: no draws, no round-robin."""
    sums = RoutingSums.of(model.config, device=model.device)
    for batch in batches:
        batch = batch.to(model.device)
        routing = Routing(group=batch.group.flatten(), counted=batch.real())
        with torch.inference_mode():
            model(batch, routing=routing.to(model.device))
            sums.add_(RoutingSums.of(model.config, [routing], model.device))
    return sums.on_host()
