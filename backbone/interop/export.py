"""A backbone's text path as a Hugging Face folder: ``config.json`` and ``model.safetensors``.

Keys are those of the published Ernie 4.5 checkpoints, an entry for every expert: transformers fuses them on
loading, vLLM reads them as they are. A layer whose routed experts add nothing (``down`` is zero, as
:mod:`.importing` makes of a dense layer) becomes a dense layer again where the configuration can say so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig, RouterConfig
from ernie5.backbone.elastic.extraction import extract
from ernie5.backbone.elastic.subnetwork import SubNetwork
from ernie5.backbone.model.experts import SparseFeedForward
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.vocabulary import UnifiedVocabulary

# Rotary positions have no end; this is what servers reserve a cache for unless told otherwise.
MAX_POSITIONS = 4096
# Router options that shape the training, never an answer.
_TRAINING_ONLY = {
    "bias_speed",
    "auxiliary_weight",
    "z_weight",
    "orthogonality_weight",
    "round_robin_steps",
    "isolated_experts",
}


def export_model(
    model: Backbone,
    folder: Path,
    *,
    subnetwork: SubNetwork | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` into ``folder``.

    Args:
        model: its text path is written; the format has no place for what reads and draws pictures and sounds.
        folder: made if need be.
        subnetwork: what to write of the model; everything by default.
        dtype: of the weights; routers and selection biases stay float32, as in published checkpoints.

    Returns:
        The content of ``config.json``.

    Raises:
        InvalidInputError: the format can't express the network: sigmoid scores or another router option;
            or a sub-network that can't stand alone.
    """
    _check_router(model.config.router)
    if subnetwork is not None:
        model = extract(model, subnetwork)
    config = model.config
    parts = [model.feed_forward(layer) for layer in range(config.layers)]
    dense = _dense_layers(parts)
    routed = [part for layer, part in enumerate(parts) if layer not in dense]
    shared = -(-max(map(_shared_width, routed), default=0) // config.expert_width)
    dense_width = max((_shared_width(parts[layer]) for layer in dense), default=config.expert_width)
    tensors = {
        "model.embed_tokens.weight": model.embeddings.token.detach(),
        "model.norm.weight": model.final_norm.detach(),
    }
    for layer, part in enumerate(parts):
        names = _attention(model.layers[layer], config)
        if layer in dense:
            names |= _swiglu("mlp", part, dense_width)
        else:
            names |= _experts(part)
            if shared:
                names |= _swiglu("mlp.shared_experts", part, shared * config.expert_width)
        tensors |= {f"model.layers.{layer}.{name}": value for name, value in names.items()}
    head = _configuration(config, dense, shared, dense_width, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: _stored(name, value, dtype) for name, value in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(folder / "config.json", head)
    _write_json(folder / "generation_config.json", _generation(head))
    return head


def _check_router(router: RouterConfig) -> None:
    if router.score != "softmax":
        raise InvalidInputError(
            f"{router.score} router scores can't be expressed by Ernie4_5_MoeForCausalLM, which takes a "
            "softmax; train with router.score softmax to export",
            param="router.score",
        )
    # Compared with the defaults one by one, so that an option added later is refused until it is known here.
    plain = RouterConfig()
    for name in set(RouterConfig.model_fields) - _TRAINING_ONLY:
        given, expressible = getattr(router, name), getattr(plain, name)
        if name == "allocation":
            given, expressible = given.policy, expressible.policy
        if given != expressible:
            raise InvalidInputError(
                f"router.{name} {given!r} can't be expressed by Ernie4_5_MoeForCausalLM, only "
                f"{expressible!r} can",
                param=f"router.{name}",
            )


def _shared_width(part: SparseFeedForward) -> int:
    return 0 if part.shared_down is None else part.shared_down.shape[1]


def _dense_layers(parts: Sequence[SparseFeedForward]) -> set[int]:
    """The silent layers at both ends; the configuration names the first and the last layer with experts.

    Of a network that is silent in between, these keep their experts, which add nothing there either.
    """
    silent = [_shared_width(part) > 0 and not bool(part.down.any()) for part in parts]
    if all(silent):
        return set(range(len(parts)))
    first, last = silent.index(False), len(parts) - 1 - silent[::-1].index(False)
    return {*range(first), *range(last + 1, len(parts))}


def _attention(block: Any, config: BackboneConfig) -> dict[str, Tensor]:
    rows = [heads * config.head_dim for heads in (config.heads, config.key_heads, config.key_heads)]
    query, key, value = block.attention.qkv.detach().split(rows)
    return {
        "input_layernorm.weight": block.attention_norm.detach(),
        "post_attention_layernorm.weight": block.feed_forward_norm.detach(),
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": block.attention.out.detach(),
    }


def _experts(part: SparseFeedForward) -> dict[str, Tensor]:
    tensors = {
        "mlp.gate.weight": part.router.detach(),
        "mlp.moe_statics.e_score_correction_bias": part.selection_bias[None],
    }
    for expert, (gate_up, down) in enumerate(zip(part.gate_up.detach(), part.down.detach())):
        gate, up = gate_up.chunk(2)
        tensors[f"mlp.experts.{expert}.gate_proj.weight"] = gate
        tensors[f"mlp.experts.{expert}.up_proj.weight"] = up
        tensors[f"mlp.experts.{expert}.down_proj.weight"] = down
    return tensors


def _swiglu(prefix: str, part: SparseFeedForward, width: int) -> dict[str, Tensor]:
    """The always-on expert, widened to ``width`` by units of zero weight, which add nothing."""
    if part.shared_gate_up is None or part.shared_down is None:
        empty = part.router.new_zeros(0, part.router.shape[1])
        gate, up, down = empty, empty, empty.T
    else:
        gate, up = part.shared_gate_up.detach().chunk(2)
        down = part.shared_down.detach()
    more = width - len(gate)
    return {
        f"{prefix}.gate_proj.weight": F.pad(gate, (0, 0, 0, more)),
        f"{prefix}.up_proj.weight": F.pad(up, (0, 0, 0, more)),
        f"{prefix}.down_proj.weight": F.pad(down, (0, more)),
    }


def _configuration(
    config: BackboneConfig, dense: set[int], shared: int, dense_width: int, dtype: torch.dtype
) -> dict[str, Any]:
    vocabulary = UnifiedVocabulary(config.text_vocabulary)
    head: dict[str, Any] = {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocabulary.size,
        "hidden_size": config.width,
        "intermediate_size": dense_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.02,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # read by transformers 4
        "use_bias": False,
        "use_cache": True,
        "bos_token_id": vocabulary.marker("begin_sample"),
        "eos_token_id": vocabulary.marker("end_turn"),
        "pad_token_id": vocabulary.marker("pad"),
    }
    routed = [index for index in range(config.layers) if index not in dense]
    if routed:
        head |= {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": "ernie4_5_moe",
            "moe_intermediate_size": config.expert_width,
            "moe_k": config.top_k,
            "moe_num_experts": config.experts,
            "moe_num_shared_experts": shared,
            "moe_layer_start_index": routed[0],
            "moe_layer_end_index": routed[-1],
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    head["ernie_multi"] = {"backbone": config.model_dump(mode="json")}
    return head


def _generation(head: dict[str, Any]) -> dict[str, Any]:
    """A text answer holds no marker but the last, as in this project's own engine."""
    text = head["ernie_multi"]["backbone"]["text_vocabulary"]
    end = head["eos_token_id"]
    return {
        **{key: head[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "suppress_tokens": [token for token in range(text, head["vocab_size"]) if token != end],
    }


def _stored(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    router = name.endswith(("mlp.gate.weight", "e_score_correction_bias"))
    return value.to(torch.float32 if router else dtype).contiguous()


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
