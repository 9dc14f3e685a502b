"""The choices of a training run by name: what it draws, and how many experts a token gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from ernie5.backbone.config import BackboneConfig, ElasticConfig
from ernie5.protocol.errors import InvalidInputError

# "own" is what the network's preset says; the others are the columns of the table in docs/architecture.md.
_DRAWS: dict[str, Callable[[BackboneConfig], ElasticConfig]] = {
    "own": lambda config: config.elastic,
    "article": lambda config: ElasticConfig.article(),
    "report": lambda config: ElasticConfig.report(config.layers, config.audio_layers),
    "off": lambda config: ElasticConfig.off(),
}
DRAWS = tuple(_DRAWS)
POLICIES = ("fixed", "threshold", "null")
# Tensors of a layer's feed-forward that only some policies have.
ALLOCATION_TENSORS = ("price_limit", "null_router", "complexity")


def with_draws(config: BackboneConfig, draws: str) -> BackboneConfig:
    """The same network with the sub-networks drawn in training of :data:`DRAWS`.

    Raises:
        InvalidInputError: an unknown name, or draws that this network can't make.
    """
    if draws not in _DRAWS:
        raise InvalidInputError(f"unknown draws {draws!r}; known: {', '.join(DRAWS)}", param="elastic")
    return _checked(config, {"elastic": _DRAWS[draws](config)}, "elastic", f"draws {draws!r}")


def with_allocation(
    config: BackboneConfig, policy: str | None = None, mean_experts: float | None = None
) -> BackboneConfig:
    """The same network with another allocation of experts; what is not given stays as it is.

    Args:
        policy: one of :data:`POLICIES`, see :class:`~ernie5.backbone.config.AllocationConfig`.
        mean_experts: the budget of ``threshold`` and ``null``, experts a token in the mean.

    Raises:
        InvalidInputError: an unknown policy, or a budget that it has none of or can't be met.
    """
    if policy is not None and policy not in POLICIES:
        raise InvalidInputError(
            f"unknown allocation {policy!r}; known: {', '.join(POLICIES)}", param="allocation"
        )
    before = config.router.allocation
    chosen = before.policy if policy is None else policy
    if chosen == "fixed" and mean_experts is not None:
        raise InvalidInputError(
            f"a fixed allocation gives every token {config.top_k} experts and has no mean to choose; take "
            "allocation threshold or null",
            param="mean_experts",
        )
    allocation = before.model_dump() | {"policy": chosen}
    if mean_experts is not None:
        allocation["budget"] = mean_experts
    router = config.router.model_dump() | {"allocation": allocation}
    return _checked(config, {"router": router}, "allocation", f"allocation {chosen!r}")


def _checked(config: BackboneConfig, changed: dict[str, Any], param: str, what: str) -> BackboneConfig:
    try:
        made = BackboneConfig.model_validate(config.model_dump() | changed)
        made.check_trainable()
    except ValidationError as error:
        reason = error.errors()[0]
        place = ".".join(str(part) for part in reason["loc"])
        said = str(reason["msg"]).removeprefix("Value error, ")
        raise InvalidInputError(
            f"{what} can't be had for {config.name}: {f'{place}: ' if place else ''}{said}", param=param
        ) from None
    except ValueError as error:
        raise InvalidInputError(f"{what} can't be had for {config.name}: {error}", param=param) from None
    return made
