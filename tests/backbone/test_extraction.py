"""An extracted sub-model is the masked parent bit for bit; impossible requests say why."""

import dataclasses

import numpy as np
import pytest
import torch

from ernie5.backbone.config import AllocationConfig, BackboneConfig, RouterConfig
from ernie5.backbone.elastic.calibration import calibration_batches, routing_of
from ernie5.backbone.elastic.extraction import extract, extracted_config
from ernie5.backbone.elastic.subnetwork import SubNetwork, choose_subnetwork, whole
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.generation import GenerationParams, Request
from tests.backbone.samples import NANO, mixed, picture, sequence, sound, text
from tests.backbone.test_inference import HASHES, loud, run

SIX = NANO.model_copy(update={"layers": 6, "audio_layers": 2})


def batches(config: BackboneConfig, count: int = 10):
    rng = np.random.default_rng(5)
    return calibration_batches([mixed(rng, kind) for kind in range(count)], config, row_length=128)


def assert_equal_outputs(parent, subnetwork, part, config):
    for batch in batches(config):
        with torch.inference_mode():
            masked = parent(batch, layers=subnetwork.layers, routing=routing_of(parent, batch, subnetwork))
            own = part(batch, routing=routing_of(part, batch, None))
        assert torch.equal(masked.text, own.text)
        assert torch.equal(masked.bits, own.bits)
        assert len(masked.audio) == len(own.audio) > 0
        assert all(torch.equal(theirs, ours) for theirs, ours in zip(masked.audio, own.audio))


@pytest.mark.parametrize("audio_layers", [1, 2])
@pytest.mark.parametrize(
    ("depth", "width", "top_k"),
    [(0.5, None, None), (None, 0.5, None), (None, None, 1), (0.67, 0.5, 1), (0.5, 0.25, 2), (1, 0.125, None)],
)
def test_logits_equal_the_masked_parents(depth, width, top_k, audio_layers):
    config = SIX.model_copy(update={"audio_layers": audio_layers})
    parent = loud(config)
    subnetwork = choose_subnetwork(parent, depth, width, top_k)
    part = extract(parent, subnetwork)
    assert (part.config.layers, part.config.audio_layers) == (len(subnetwork.layers), audio_layers)
    assert part.config.kept_layers == (0, *range(part.config.layers - audio_layers, part.config.layers))
    assert_equal_outputs(parent, subnetwork, part, config)


def test_differing_experts_in_each_layer_and_a_selection_bias():
    parent = loud(SIX)
    with torch.no_grad():
        for layer in range(6):
            parent.feed_forward(layer).selection_bias.normal_(generator=torch.Generator().manual_seed(layer))
    rng = np.random.default_rng(0)
    experts = tuple(tuple(sorted(rng.permutation(8)[:3].tolist())) for _ in range(6))
    subnetwork = SubNetwork((0, 2, 4, 5), experts, 2)
    part = extract(parent, subnetwork)
    assert part.feed_forward(1).gate_up.shape[0] == 3
    assert torch.equal(
        part.feed_forward(1).selection_bias, parent.feed_forward(2).selection_bias[list(experts[2])]
    )
    assert_equal_outputs(parent, subnetwork, part, SIX)


def test_experts_isolated_by_kind_keep_their_kind():
    config = SIX.model_copy(update={"experts": 16, "router": RouterConfig(pool="isolated")})
    parent = loud(config)
    subnetwork = choose_subnetwork(parent, width=0.5)
    part = extract(parent, subnetwork)
    assert part.config.expert_shares == (2, 2, 2, 2)
    assert_equal_outputs(parent, subnetwork, part, config)


@pytest.mark.parametrize("policy", ["threshold", "null"])
@pytest.mark.parametrize(("depth", "width", "top_k"), [(0.67, 0.5, None), (0.67, 0.5, 2), (None, None, 1)])
def test_a_dynamic_number_of_experts_stays_the_same(policy, depth, width, top_k):
    allocation = AllocationConfig(policy=policy, budget=2)
    config = SIX.model_copy(update={"top_k": 4, "router": RouterConfig(allocation=allocation)})
    parent = loud(config)
    subnetwork = choose_subnetwork(parent, depth, width, top_k)
    assert_equal_outputs(parent, subnetwork, extract(parent, subnetwork), config)


def test_generated_tokens_equal_the_masked_parents(tmp_path):
    parent = loud(SIX)
    save_model(tmp_path / "part", extract(parent, choose_subnetwork(parent, 0.67, 0.5, 1)), HASHES)
    part, hashes = load_model(tmp_path / "part")
    assert hashes == HASHES

    def answers(model, **choice):
        rng = np.random.default_rng(3)
        prompts = [
            sequence(text(rng, "context")),
            sequence(picture(rng, "context"), sound(rng, "context"), text(rng, "context")),
        ]
        wanted = [("text",), ("speech",), ("image", "text")]
        requests = [
            Request(
                f"{number}-{'-'.join(modalities)}",
                prompt,
                GenerationParams(
                    modalities=modalities,
                    seed=number,
                    max_tokens=30,
                    max_frames=5,
                    image_grid=(4, 4),
                    **choice,
                ),
            )
            for number, prompt in enumerate(prompts)
            for modalities in wanted
        ]
        # One at a time: equality to the bit holds for equal batches.
        engine = InferenceEngine(model, HASHES, capacity=1, max_length=200)
        return run(engine, *requests)

    ours, theirs = answers(part), answers(parent, depth=0.67, width=0.5, experts_per_token=1)
    assert repr(ours) == repr(theirs)
    assert sum(len(events) for events in ours.values()) > 60


def test_the_name_tells_what_was_kept():
    parent = loud(SIX)
    assert extract(parent, choose_subnetwork(parent, 0.5, 0.5, 1)).config.name == "nano-d50-w50-k1"
    assert extracted_config(SIX, whole(SIX)) == SIX


@pytest.mark.parametrize(
    ("depth", "width", "top_k", "reason"),
    [
        (0.2, None, None, "leaves 1 of 6 layers.*least depth is 0.5"),
        (0, None, None, "outside"),
        (1.5, None, None, "outside"),
        (None, 0.01, None, "leaves none of 8 experts"),
        (None, -1, None, "outside"),
        (None, None, 3, r"3 experts a token is outside \[1, 2\]"),
        (None, None, 0, "outside"),
        (None, 0.125, 2, "2 experts a token, but only 1 of 8 are active"),
    ],
)
def test_impossible_requests_say_why(depth, width, top_k, reason):
    parent = loud(SIX)
    with pytest.raises(InvalidInputError, match=reason):
        choose_subnetwork(parent, depth, width, top_k)
    if (depth is None or 0 < depth <= 1) and (width is None or 0 < width <= 1) and top_k != 0:
        # The engine refuses them when they are asked for, not while it answers.
        engine = InferenceEngine(parent, HASHES, capacity=1, max_length=100)
        params = GenerationParams(depth=depth, width=width, experts_per_token=top_k)
        with pytest.raises(InvalidInputError, match=reason):
            engine.submit(Request("r", sequence(text(np.random.default_rng(0), "context")), params))


def test_sub_networks_that_are_no_model_are_refused():
    full = whole(SIX)
    uneven = ((0, 1), (0, 1, 2), *full.experts[2:])
    for changed, reason in [
        ({"layers": (0, 1, 5)}, r"layers \[4\] can't be left out"),
        ({"layers": (1, 4, 5)}, r"layers \[0\] can't be left out"),
        ({"layers": (0, 5, 4)}, "not ascending"),
        ({"layers": (0, 4, 5, 6)}, "below 6"),
        ({"experts": uneven}, "equally many"),
        ({"experts": ((2, 1),) * 6}, "not ascending"),
        ({"experts": ((0, 8),) * 6}, "below 8"),
        ({"experts": ((0,),) * 6}, "2 experts a token, but 1 are kept"),
    ]:
        with pytest.raises(InvalidInputError, match=reason):
            extracted_config(SIX, dataclasses.replace(full, **changed))
