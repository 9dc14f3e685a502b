"""Extraction: a sub-network as a model of its own, equal to the masked parent bit for bit.

Rows of the router and of the experts' weights are copied, layers are renumbered. The masked parent slices its
router's rows before the product and groups tokens by expert in the same order, so both compute the same
numbers. The first layer and the top ``audio_layers`` always stay, so the audio heads keep their levels.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.elastic.subnetwork import SubNetwork, expert_pools
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError

# Tensors of a feed-forward that have one entry an expert in their first dimension.
EXPERT_TENSORS = ("router", "selection_bias", "gate_up", "down")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def extracted_config(config: BackboneConfig, subnetwork: SubNetwork) -> BackboneConfig:
    """The configuration of the extracted model; its name tells what was kept, ``mini-d62-w50-k1``.

    Raises:
        InvalidInputError: layers that don't exist or must stay, differing numbers of experts, or k above it.
    """
    layers = subnetwork.layers
    if list(layers) != sorted(set(layers)) or not set(layers) <= set(range(config.layers)):
        raise InvalidInputError(f"layers {layers} are not ascending numbers below {config.layers}")
    missing = set(config.kept_layers) - set(layers)
    if missing:
        raise InvalidInputError(
            f"layers {sorted(missing)} can't be left out: the first one and the top {config.audio_layers} "
            "carry what every answer needs"
        )
    kept = {_kept_experts(config, layer, subnetwork.experts[layer]) for layer in layers}
    if len(kept) > 1:
        raise InvalidInputError(f"all layers must keep equally many experts of each pool, got {sorted(kept)}")
    (pools,) = kept
    count = sum(pools)
    if not 1 <= subnetwork.top_k <= min(pools):
        raise InvalidInputError(f"{subnetwork.top_k} experts a token, but {min(pools)} are kept; lower k")
    parts = [
        f"{letter}{100 * some // every}"
        for letter, some, every in (("d", len(layers), config.layers), ("w", count, config.experts))
        if some < every
    ]
    if subnetwork.top_k < config.top_k:
        parts.append(f"k{subnetwork.top_k}")
    changed: dict[str, Any] = {
        "name": "-".join([config.name, *parts]),
        "layers": len(layers),
        "experts": count,
        "top_k": subnetwork.top_k,
    }
    if config.shared_expert_widths is not None:
        changed["shared_expert_widths"] = [config.shared_expert_widths[layer] for layer in layers]
    if config.router.pool == "isolated":
        changed["router"] = config.router.model_dump() | {"isolated_experts": pools}
    fewer = config.elastic.top_k_range
    if fewer is not None and fewer[1] >= max(subnetwork.top_k, 2):
        changed["elastic"] = config.elastic.model_dump() | {"top_k_range": None}
    return BackboneConfig.model_validate(config.model_dump() | changed)


def _kept_experts(config: BackboneConfig, layer: int, ids: tuple[int, ...] | None) -> tuple[int, ...]:
    """How many experts of each pool a layer keeps; a shared pool is one."""
    pools = expert_pools(config)
    if ids is None:
        return tuple(len(pool) for pool in pools)
    if list(ids) != sorted(set(ids)) or not set(ids) <= set(range(config.experts)) or not ids:
        raise InvalidInputError(
            f"experts {ids} of layer {layer} are not ascending numbers below {config.experts}"
        )
    return tuple(len(set(pool) & set(ids)) for pool in pools)


def extract(model: Backbone, subnetwork: SubNetwork) -> Backbone:
    """A model that holds the sub-network's weights alone, in evaluation mode.

    Raises:
        InvalidInputError: see :func:`extracted_config`.
    """
    out = Backbone(extracted_config(model.config, subnetwork))
    out.compute_dtype = model.compute_dtype
    number = {layer: position for position, layer in enumerate(subnetwork.layers)}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        found = _LAYER.fullmatch(name)
        if found is None:
            state[name] = tensor
            continue
        layer, rest = int(found[1]), found[2]
        if layer not in number:
            continue
        ids = subnetwork.experts[layer]
        part, _, leaf = rest.rpartition(".")
        if ids is not None and part == "feed_forward" and leaf in EXPERT_TENSORS:
            tensor = tensor[torch.tensor(ids)]
        state[f"layers.{number[layer]}.{rest}"] = tensor
    out.load_state_dict(state)
    return out.eval()
