"""A Hugging Face folder of the Ernie 4.5 family as a backbone: a start for multimodal elastic training.

Every layer of a backbone has routed experts. A dense layer, of which Ernie4.5-MoE has a few and Ernie4.5 has
nothing else, becomes the layer's always-on expert; its routed experts start with ``down`` = 0, so that they
add nothing until training moves them, and the network computes what it did before.

What the folder doesn't hold starts fresh from the seed: embeddings and heads of pictures and sounds, routed
experts of dense layers, and the markers' embeddings, which start near the mean of all text embeddings, so
that they are neither favoured nor shut out (Hewitt, "Initializing New Word Embeddings for Pretrained Language
Models", 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.interop.folder import WeightFolder, read_json
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.vocabulary import MARKER_SLOTS

_MARKER_SPREAD = 0.1
# (value that the network here has built in, value of a folder that doesn't say)
_FIXED: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("silu", "silu"),
    "use_bias": (False, False),
    "quantization_config": (None, None),
    "rope_scaling": (None, None),
    "moe_norm_min": (1e-12, 1e-12),
}
_KNOWN = ("ernie4_5_moe", "ernie4_5")


@dataclass(frozen=True)
class UpcycledExperts:
    """Routed experts to give to a network that has none; ``width`` None: an eighth of its dense layers."""

    count: int = 8
    top_k: int = 2
    width: int | None = None


def import_model(folder: Path, *, experts: UpcycledExperts | None = None, seed: int = 0) -> Backbone:
    """The network in ``folder`` (``Ernie4_5_MoeForCausalLM`` or ``Ernie4_5ForCausalLM``), ready to train.

    Its text logits over the folder's vocabulary are those of the original.

    Args:
        folder: with ``config.json`` and safetensors, whole or in shards.
        experts: for a dense network only.
        seed: of everything that starts fresh.

    Raises:
        InvalidInputError: no such folder, a damaged one, or a network that a backbone can't express; the
            message names the option.
    """
    head = read_json(folder / "config.json")
    config = backbone_config(head, experts=experts, name=folder.resolve().name)
    weights = WeightFolder(folder)  # before memory is taken for what config.json says
    model = Backbone(config, seed=seed)
    with torch.no_grad():
        _fill(model, weights, head, torch.Generator().manual_seed(seed))
    left = [name for name in weights.left() if not name.startswith(("mtp", "model.mtp"))]
    if left:
        raise InvalidInputError(
            f"{folder} holds {len(left)} weights that its config.json doesn't account for, first {left[0]}"
        )
    return model.eval()


def backbone_config(
    head: Mapping[str, Any], *, experts: UpcycledExperts | None = None, name: str = "imported"
) -> BackboneConfig:
    """The configuration that a Hugging Face ``config.json`` asks for; raises as :func:`import_model`."""
    kind = head.get("model_type")
    if kind not in _KNOWN:
        raise InvalidInputError(f"model_type {kind!r} can't be imported; known: {', '.join(_KNOWN)}")
    for key, (built_in, default) in _FIXED.items():
        if head.get(key, default) != built_in:
            raise InvalidInputError(
                f"{key} = {head[key]!r} can't be expressed; a backbone has {key} = {built_in!r}", param=key
            )
    own = head.get("ernie_multi")
    try:
        base = BackboneConfig.model_validate(own["backbone"]) if own else BackboneConfig(name=name)
        moe = kind == "ernie4_5_moe"
        layers, dense_width = int(head["num_hidden_layers"]), int(head["intermediate_size"])
        dense = _dense_layers(head) if moe else tuple(range(layers))
        if moe:
            if experts is not None:
                raise InvalidInputError(
                    "this network has experts of its own; give their number only for a dense one",
                    param="experts",
                )
            count, top_k = int(head["moe_num_experts"]), int(head["moe_k"])
            width = int(head["moe_intermediate_size"])
            shared = int(head["moe_num_shared_experts"] or 0) * width
        else:
            before = UpcycledExperts(base.experts, base.top_k, base.expert_width)
            added = experts or (before if own else UpcycledExperts())
            count, top_k, shared = added.count, added.top_k, dense_width
            width = added.width or max(8, dense_width // 8)
        widths = tuple(dense_width if layer in dense else shared for layer in range(layers))
        same = len(set(widths)) == 1
        heads = int(head["num_attention_heads"])
        mapped = {
            "layers": layers,
            "width": head["hidden_size"],
            "heads": heads,
            "key_heads": head.get("num_key_value_heads") or heads,
            "head_dim": _head_dim(head, moe),
            "experts": count,
            "top_k": top_k,
            "expert_width": width,
            "shared_expert_width": widths[0] if same else shared,
            "shared_expert_widths": None if same else widths,
            "text_vocabulary": _text_vocabulary(head),
            "rope_theta": _rope_theta(head),
            "norm_epsilon": head["rms_norm_eps"],
            "audio_layers": min(base.audio_layers, max(1, layers - 1)),
        }
        return BackboneConfig.model_validate({**base.model_dump(), **mapped})
    except InvalidInputError:
        raise
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"can't be imported: {error}"
        raise InvalidInputError(f"config.json {what}") from None


def _head_dim(head: Mapping[str, Any], moe: bool) -> int:
    # A dense configuration that doesn't say means 128; one with experts derives it.
    default = None if moe else 128
    return int(head.get("head_dim", default) or int(head["hidden_size"]) // int(head["num_attention_heads"]))


def _text_vocabulary(head: Mapping[str, Any]) -> int:
    """V of the imported tokenizer; an export of this project already counts the markers."""
    size = int(head["vocab_size"])
    return size - MARKER_SLOTS if head.get("ernie_multi") else size


def _rope_theta(head: Mapping[str, Any]) -> float:
    rope = head.get("rope_parameters") or {}
    kind, turned = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1)
    if kind != "default" or turned != 1:
        raise InvalidInputError(f"rope_parameters {rope} can't be expressed; only the default type can")
    return float(rope.get("rope_theta") or head.get("rope_theta") or 5e5)


def _dense_layers(head: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without routed experts, by the rule of ``Ernie4_5_MoeDecoderLayer``."""
    layers = int(head["num_hidden_layers"])
    start, interval = int(head.get("moe_layer_start_index", 1)), int(head.get("moe_layer_interval", 1))
    end = int(head.get("moe_layer_end_index", -1))
    end = layers - 1 if end == -1 else end
    return tuple(layer for layer in range(layers) if (layer + 1) % interval or not start <= layer <= end)


def _fill(
    model: Backbone, weights: WeightFolder, head: Mapping[str, Any], generator: torch.Generator
) -> None:
    config = model.config
    size, width = int(head["vocab_size"]), config.width
    table = weights.take("model.embed_tokens.weight", size, width)
    untied = not head.get("tie_word_embeddings", True)
    if (untied or "lm_head.weight" in weights) and not torch.equal(
        weights.take("lm_head.weight", size, width), table
    ):
        raise InvalidInputError(
            "this network's lm_head has weights of its own (tie_word_embeddings false); a backbone ties its "
            "text head to the embedding",
            param="tie_word_embeddings",
        )
    token: Tensor = model.embeddings.token
    token[:size] = table
    if size < len(token):
        text = token[:size]
        noise = torch.randn(len(token) - size, width, generator=generator)
        token[size:] = text.mean(0) + _MARKER_SPREAD * text.std(0) * noise
    model.final_norm.copy_(weights.take("model.norm.weight", width))
    dense = _dense_layers(head) if head["model_type"] == "ernie4_5_moe" else range(config.layers)
    for layer in range(config.layers):
        _fill_attention(model, layer, weights)
        prefix = f"model.layers.{layer}.mlp"
        part = model.feed_forward(layer)
        if layer in dense:
            part.down.zero_()
        else:
            _fill_experts(model, layer, weights)
            prefix += ".shared_experts"
        if part.shared_gate_up is not None and part.shared_down is not None:
            shared = config.shared_width(layer)
            part.shared_gate_up[:shared] = weights.take(f"{prefix}.gate_proj.weight", shared, width)
            part.shared_gate_up[shared:] = weights.take(f"{prefix}.up_proj.weight", shared, width)
            part.shared_down.copy_(weights.take(f"{prefix}.down_proj.weight", width, shared))


def _fill_attention(model: Backbone, layer: int, weights: WeightFolder) -> None:
    config = model.config
    block: Any = model.layers[layer]
    prefix = f"model.layers.{layer}"
    block.attention_norm.copy_(weights.take(f"{prefix}.input_layernorm.weight", config.width))
    block.feed_forward_norm.copy_(weights.take(f"{prefix}.post_attention_layernorm.weight", config.width))
    rows = {"q": config.heads, "k": config.key_heads, "v": config.key_heads}
    parts = [
        weights.take(f"{prefix}.self_attn.{name}_proj.weight", heads * config.head_dim, config.width)
        for name, heads in rows.items()
    ]
    block.attention.qkv.copy_(torch.cat(parts))
    out = weights.take(f"{prefix}.self_attn.o_proj.weight", config.width, config.heads * config.head_dim)
    block.attention.out.copy_(out)


def _fill_experts(model: Backbone, layer: int, weights: WeightFolder) -> None:
    """Router and experts, which are saved one by one or, by some, fused."""
    config, part = model.config, model.feed_forward(layer)
    count, hidden, width = config.experts, config.expert_width, config.width
    prefix = f"model.layers.{layer}.mlp"
    part.router.copy_(weights.take(f"{prefix}.gate.weight", count, width))
    for place in ("", ".gate"):
        bias = f"{prefix}{place}.moe_statics.e_score_correction_bias"
        if bias in weights:
            part.selection_bias.copy_(weights.take(bias, 1, count)[0])
    if f"{prefix}.experts.gate_up_proj" in weights:
        part.gate_up.copy_(weights.take(f"{prefix}.experts.gate_up_proj", count, 2 * hidden, width))
        part.down.copy_(weights.take(f"{prefix}.experts.down_proj", count, width, hidden))
        return
    for expert in range(count):
        name = f"{prefix}.experts.{expert}"
        part.gate_up[expert, :hidden] = weights.take(f"{name}.gate_proj.weight", hidden, width)
        part.gate_up[expert, hidden:] = weights.take(f"{name}.up_proj.weight", hidden, width)
        part.down[expert].copy_(weights.take(f"{name}.down_proj.weight", width, hidden))
