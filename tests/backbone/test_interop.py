"""Exchange with Hugging Face: the other implementation of the same network must compute the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ernie5.backbone.config import AllocationConfig, BackboneConfig, ElasticConfig, RouterConfig
from ernie5.backbone.elastic.subnetwork import SubNetwork
from ernie5.backbone.interop import UpcycledExperts, export_model, import_model
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.experts import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import pack
from ernie5.backbone.training.checkpoint import checkpoints, load_model
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary
from tests.backbone.hugging_face import TEXT, hugging_face, other

TOLERANCE = 1e-4
SHAPE: dict[str, Any] = {
    "layers": 3,
    "width": 48,
    "heads": 4,
    "key_heads": 2,
    "head_dim": 16,
    "experts": 6,
    "top_k": 2,
    "expert_width": 24,
    "text_vocabulary": TEXT,
    "bits": 6,
    "audio_levels": 2,
    "audio_codebook": 8,
    "rope_theta": 3e4,
    "norm_epsilon": 3e-5,
}


def backbone(**changes: Any) -> Backbone:
    """A small network far from its start: large weights, uneven norms, selection biases that decide."""
    model = Backbone(BackboneConfig(**(SHAPE | changes)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if name.endswith("norm") else 0.2 * noise)
        for layer in range(model.config.layers):
            bias = model.feed_forward(layer).selection_bias
            bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    return model.eval()


def sample(seed: int = 0, vocabulary: int = TEXT) -> TokenSequence:
    """A question and an answer of random text."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> TokenSpan:
        codes = rng.integers(0, vocabulary, length).astype(np.int32)
        return TokenSpan("text", SequenceLayout(vocabulary), codes, "t")

    return TokenSequence(str(seed), (TokenSegment(text(21), "context"), TokenSegment(text(13), "target")))


def own_logits(
    model: Backbone, sequence: TokenSequence, subnetwork: SubNetwork | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids ``[n]`` of a packed sample and float32 logits ``[n, V + markers]`` at all its positions."""
    layout = lay_out(sequence, model.config, UnifiedVocabulary(model.config.text_vocabulary))
    batch = pack([[layout]], 64, model.config)  # longer than the sample: there is padding
    chosen: dict[str, Any] = {}
    if subnetwork is not None:
        chosen = {"layers": subnetwork.layers, "routing": subnetwork.routing()}
    hidden = model(batch, **chosen).hidden[0, : len(layout)]
    return torch.from_numpy(layout.token), model.text_logits(hidden)


def other_logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids[None]).logits[0]


def difference(one: Tensor, two: Tensor) -> float:
    assert one.std() > 0.1  # not the agreement of zeros
    return float((one - two).abs().max().detach())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared_expert_width": 24},
        {"shared_expert_width": 48},
        {"shared_expert_width": 20},  # widened to 24
        {"shared_expert_widths": (0, 48, 30)},
        {"heads": 3, "key_heads": 1, "head_dim": 32},  # heads * head_dim is not the width
        {"top_k": 6},
        {"top_k": 1, "key_heads": 4},
    ],
    ids=str,
)
def test_an_exported_network_computes_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    model = backbone(**changes)
    export_model(model, tmp_path)
    ids, expected = own_logits(model, sample())
    assert difference(expected, other_logits(other(tmp_path), ids)) <= TOLERANCE


def test_the_selection_bias_is_what_makes_them_agree(tmp_path: Path) -> None:
    model = backbone()
    ids, expected = own_logits(model, sample())
    for layer in range(3):
        model.feed_forward(layer).selection_bias.zero_()
    export_model(model, tmp_path)
    assert difference(expected, other_logits(other(tmp_path), ids)) > 100 * TOLERANCE


def test_gradients_agree(tmp_path: Path) -> None:
    model = backbone(shared_expert_width=24)
    export_model(model, tmp_path)
    twin = other(tmp_path)
    ids, logits = own_logits(model, sample())
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
    torch.nn.functional.cross_entropy(other_logits(twin, ids)[:-1], ids[1:]).backward()
    for layer in range(3):
        ours, theirs = model.layers[layer], twin.model.layers[layer]
        pairs = {
            "qkv": (
                ours.attention.qkv,
                torch.cat([getattr(theirs.self_attn, f"{name}_proj").weight.grad for name in "qkv"]),
            ),
            "router": (ours.feed_forward.router, theirs.mlp.gate.weight.grad),
            "gate_up": (ours.feed_forward.gate_up, theirs.mlp.experts.gate_up_proj.grad),
            "down": (ours.feed_forward.down, theirs.mlp.experts.down_proj.grad),
            "shared": (ours.feed_forward.shared_down, theirs.mlp.shared_experts.down_proj.weight.grad),
            "norm": (ours.attention_norm, theirs.input_layernorm.weight.grad),
        }
        for name, (parameter, expected) in pairs.items():
            assert expected.abs().max() > 1e-4, name
            torch.testing.assert_close(parameter.grad, expected, atol=1e-5, rtol=1e-3, msg=name)
    torch.testing.assert_close(
        model.embeddings.token.grad, twin.model.embed_tokens.weight.grad, atol=1e-5, rtol=1e-3
    )


def text_path(model: Backbone) -> dict[str, Tensor]:
    """The weights that a Hugging Face folder holds."""
    foreign = ("embeddings.", "heads.")
    state = model.state_dict()
    return {
        name: value
        for name, value in state.items()
        if name == "embeddings.token" or not name.startswith(foreign)
    }


@pytest.mark.parametrize("shared", [0, 24, 48])
def test_export_and_import_give_the_same_network_bit_for_bit(shared: int, tmp_path: Path) -> None:
    model = backbone(shared_expert_width=shared)
    export_model(model, tmp_path)
    again = import_model(tmp_path)
    assert again.config == model.config
    expected, found = text_path(model), text_path(again)
    assert found.keys() == expected.keys() and len(found) > 20
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_what_transformers_writes_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = backbone(shared_expert_width=24)
    export_model(model, tmp_path / "ours")
    other(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = import_model(tmp_path / "theirs")
    assert again.config == model.config
    for name, value in text_path(model).items():
        assert torch.equal(text_path(again)[name], value), name


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_num_shared_experts": 0},
        {"moe_num_shared_experts": 1},
        {"moe_num_shared_experts": 2},
        {"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
        {"moe_num_shared_experts": 0, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
        {"moe_num_shared_experts": 2, "moe_layer_interval": 2},
        {"moe_num_shared_experts": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    ],
    ids=str,
)
def test_an_imported_network_computes_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    twin = hugging_face("moe", tmp_path, **changes)
    model = import_model(tmp_path)
    _check_text(model, twin)


@pytest.mark.parametrize("experts", [None, UpcycledExperts(5, 3, 16)], ids=str)
def test_an_imported_dense_network_computes_the_same(experts: UpcycledExperts | None, tmp_path: Path) -> None:
    twin = hugging_face("dense", tmp_path)
    model = import_model(tmp_path, experts=experts)
    assert (model.config.experts, model.config.top_k) == ((8, 2) if experts is None else (5, 3))
    _check_text(model, twin)


def _check_text(model: Backbone, twin: Any) -> None:
    """Logits over the original vocabulary agree on text, positions from 0 on, without any marker."""
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, TEXT, 40))
    positions = torch.arange(40.0)[None, :, None].expand(1, 40, 3)

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    hidden = model.run(model.embeddings.token[ids][None], positions, attend, Routing())
    logits = model.text_logits(hidden[0])
    assert logits.shape == (40, TEXT + 160)
    assert difference(logits[:, :TEXT], other_logits(twin, ids)) <= TOLERANCE


def test_an_imported_dense_layer_is_exported_as_one(tmp_path: Path) -> None:
    twin = hugging_face("moe", tmp_path / "theirs", moe_num_shared_experts=1, moe_layer_start_index=1)
    model = import_model(tmp_path / "theirs")
    head = export_model(model, tmp_path / "ours")
    assert (head["moe_layer_start_index"], head["intermediate_size"]) == (1, 40)
    again = other(tmp_path / "ours")
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, twin.model.layers[0].mlp.up_proj.weight)
    # Once its experts have learned something the layer is a sparse one, whose shared expert is the widest.
    with torch.no_grad():
        model.feed_forward(0).down.normal_(0, 0.2)
    head = export_model(model, tmp_path / "trained")
    assert (head["moe_layer_start_index"], head["moe_num_shared_experts"]) == (0, 2)
    ids, expected = own_logits(model, sample())
    assert difference(expected, other_logits(other(tmp_path / "trained"), ids)) <= TOLERANCE


def test_an_imported_dense_network_is_exported_as_one(tmp_path: Path) -> None:
    twin = hugging_face("dense", tmp_path / "theirs")
    export_model(import_model(tmp_path / "theirs"), tmp_path / "ours")
    again = other(tmp_path / "ours")
    assert type(again).__name__ == "Ernie4_5ForCausalLM"
    ids = torch.arange(20)
    assert difference(other_logits(twin, ids), other_logits(again, ids)[:, :TEXT]) <= TOLERANCE


def test_an_imported_dense_network_trains_and_its_experts_join_in(tmp_path: Path) -> None:
    hugging_face("dense", tmp_path / "theirs", num_hidden_layers=4)
    model = import_model(tmp_path / "theirs")
    config = model.config.model_copy(update={"elastic": ElasticConfig(depth_range=(0.5, 0.7))})
    options = TrainingConfig(
        steps=5, rows=2, row_length=64, warmup=1, threads=1, checkpoint_every=5, learning_rate=3e-3
    )
    trainer = Trainer(config, options, tmp_path / "run", {})
    trainer.model.load_state_dict(model.state_dict())
    reports = list(trainer.run((number, sample(number % 2)) for number in count()))
    assert reports[-1].loss < reports[0].loss
    trained, _ = load_model(checkpoints(tmp_path / "run")[-1])
    for layer in range(4):
        assert trained.feed_forward(layer).down.abs().max() > 1e-4
    head = export_model(trained, tmp_path / "ours")
    assert head["model_type"] == "ernie4_5_moe" and head["moe_layer_start_index"] == 0
    ids, expected = own_logits(trained, sample())
    assert difference(expected, other_logits(other(tmp_path / "ours"), ids)) <= TOLERANCE


@pytest.mark.parametrize("keep", ["layers", "experts", "top_k", "all"])
def test_an_exported_sub_network_computes_the_same(keep: str, tmp_path: Path) -> None:
    model = backbone(shared_expert_width=24, layers=4)
    layers = (0, 2, 3) if keep in ("layers", "all") else (0, 1, 2, 3)
    experts: Sequence[tuple[int, ...] | None] = (None,) * 4
    if keep in ("experts", "all"):
        experts = ((0, 2, 5), (1, 2, 3), (3, 4, 5), (0, 1, 5))
    chosen = SubNetwork(layers, tuple(experts), 1 if keep in ("top_k", "all") else 2)
    head = export_model(model, tmp_path, subnetwork=chosen)
    assert head["num_hidden_layers"] == len(layers)
    assert head["moe_num_experts"] == (3 if keep in ("experts", "all") else 6)
    ids, expected = own_logits(model, sample(), chosen)
    assert difference(expected, other_logits(other(tmp_path), ids)) <= TOLERANCE
    whole = own_logits(model, sample())[1]
    assert difference(expected, whole) > 100 * TOLERANCE


def test_unequal_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    chosen = SubNetwork((0, 1, 2), ((0, 1), None, (0, 1)), 1)
    with pytest.raises(InvalidInputError, match="equally many experts"):
        export_model(backbone(), tmp_path, subnetwork=chosen)


def test_sigmoid_scores_are_refused(tmp_path: Path) -> None:
    model = backbone(router=RouterConfig(score="sigmoid"))
    with pytest.raises(InvalidInputError, match="sigmoid router scores can't be expressed"):
        export_model(model, tmp_path)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (RouterConfig(allocation=AllocationConfig(policy="threshold")), "router.allocation 'threshold'"),
        (RouterConfig(pool="isolated", isolated_experts=(2, 1, 1, 2)), "router.pool 'isolated'"),
    ],
    ids=["allocation", "pool"],
)
def test_routers_of_another_kind_are_refused(router: RouterConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        export_model(backbone(router=router, top_k=1), tmp_path)


def test_bfloat16_weights_keep_the_router_exact(tmp_path: Path) -> None:
    model = backbone()
    export_model(model, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == torch.bfloat16
    assert torch.equal(stored["model.layers.1.mlp.gate.weight"], model.feed_forward(1).router)
    again = import_model(tmp_path)
    assert torch.equal(again.feed_forward(2).down, model.feed_forward(2).down.bfloat16().float())
    assert torch.equal(again.feed_forward(2).selection_bias, model.feed_forward(2).selection_bias)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    twin = hugging_face("moe", tmp_path / "whole", moe_num_shared_experts=1)
    twin.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = import_model(tmp_path / "whole"), import_model(tmp_path / "shards")
    for name, value in text_path(whole).items():
        assert torch.equal(text_path(shards)[name], value), name


def test_new_markers_start_near_the_other_tokens(tmp_path: Path) -> None:
    hugging_face("moe", tmp_path)
    token = import_model(tmp_path, seed=5).embeddings.token.detach()
    text, markers = token[:TEXT], token[TEXT:]
    assert len(markers) == 160
    assert (markers - text.mean(0)).abs().max() < 0.6 * text.std(0).max()
    assert len(markers.unique(dim=0)) == 160
    assert torch.equal(token, import_model(tmp_path, seed=5).embeddings.token)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", "model_type 'llama' can't be imported"),
        ("use_bias", True, "use_bias = True can't be expressed"),
        ("hidden_act", "gelu", "hidden_act = 'gelu'"),
        ("moe_norm_min", 1e-3, "moe_norm_min = 0.001"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, "yarn"),
        ("quantization_config", {"bits": 4}, "quantization_config"),
        ("moe_k", 7, "top_k 7 exceeds experts 6"),
        ("hidden_size", "wide", "config.json can't be imported"),
        ("hidden_size", 64, r"has shape \[61, 48\]; its config.json asks for \[61, 64\]"),
        ("num_hidden_layers", 4, "lacks the weight model.layers.3"),
        ("num_hidden_layers", 2, "weights that its config.json doesn't account for, first model.layers.2"),
        ("moe_num_experts", None, "config.json can't be imported"),
    ],
)
def test_what_a_backbone_cannot_express_is_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    hugging_face("moe", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(InvalidInputError, match=message):
        import_model(tmp_path)


def test_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    hugging_face("moe", tmp_path, tie_word_embeddings=False)
    with pytest.raises(InvalidInputError, match="ties its text head"):
        import_model(tmp_path)


def test_a_head_that_repeats_the_embedding_and_mtp_layers_are_passed_over(tmp_path: Path) -> None:
    hugging_face("moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.mtp_block.0.mlp.up_proj.weight"] = torch.zeros(4, 4)
    before = import_model(tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(import_model(tmp_path).embeddings.token, before.embeddings.token)


def test_experts_are_only_given_to_a_dense_network(tmp_path: Path) -> None:
    hugging_face("moe", tmp_path)
    with pytest.raises(InvalidInputError, match="has experts of its own"):
        import_model(tmp_path, experts=UpcycledExperts())


def test_folders_that_hold_no_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"lacks config\.json"):
        import_model(tmp_path)
    hugging_face("moe", tmp_path)
    weights = (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidInputError, match=r"as pickles \(pytorch_model\.bin\)"):
        import_model(tmp_path)
    weights.unlink()
    with pytest.raises(InvalidInputError, match="holds neither"):
        import_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidInputError, match="is damaged"):
        import_model(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "x.bin", "absent.safetensors"])
def test_an_index_names_files_of_its_folder_only(name: str, tmp_path: Path) -> None:
    hugging_face("moe", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, tmp_path.parent / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InvalidInputError, match=r"no safetensors file of its folder|which its index names"):
        import_model(tmp_path)
