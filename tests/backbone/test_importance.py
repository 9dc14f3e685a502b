"""Measured importance finds what a model really uses."""

import numpy as np
import pytest
import torch

from ernie5.backbone.elastic.calibration import calibration_batches, measure_loss
from ernie5.backbone.elastic.importance import (
    EXPERT_SCORES,
    random_experts,
    random_layers,
    rank_layers,
    ranking_passes,
    score_experts,
    select_subnetwork,
    selection_passes,
)
from ernie5.backbone.elastic.subnetwork import SubNetwork, best_experts, pool_counts, whole
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.layout import lay_out
from ernie5.backbone.rows import pack
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.generation import GenerationParams, Request
from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan
from tests.backbone.samples import NANO, VOCABULARY, mixed, sequence, text
from tests.backbone.test_inference import HASHES, loud, run

SIX = NANO.model_copy(update={"layers": 6})


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(1)
    return calibration_batches([mixed(rng, kind) for kind in range(10)], SIX, row_length=128)


def test_each_round_drops_the_layer_that_is_missed_least(batches):
    model = loud(SIX)
    calls = []
    ranking = rank_layers(model, batches, on_pass=lambda: calls.append(1))
    assert len(calls) == ranking_passes(SIX) == 4 + 3 + 2 + 1
    left = [0, 1, 2, 3, 4, 5]
    for dropped, recorded in zip(ranking.dropped, ranking.loss):
        losses = {}
        for candidate in set(left) - {0, 5}:  # the first and the audio layer stay
            rest = tuple(layer for layer in left if layer != candidate)
            losses[candidate] = measure_loss(
                model, batches, SubNetwork(rest, whole(SIX).experts, SIX.top_k)
            ).total
        assert losses[dropped] == min(losses.values()) == recorded
        left.remove(dropped)
    assert left == [0, 5] == list(ranking.keep(SIX, 2))
    assert ranking.keep(SIX, 4) == tuple(sorted({0, 5, *ranking.dropped[2:]}))


def test_a_layer_that_does_nothing_can_be_dropped_for_nothing(batches):
    model = loud(SIX)
    with torch.no_grad():
        model.layers[2].attention.out.zero_()
        model.feed_forward(2).down.zero_()
    without = SubNetwork((0, 1, 3, 4, 5), whole(SIX).experts, SIX.top_k)
    assert measure_loss(model, batches, without).total == pytest.approx(measure_loss(model, batches).total)
    assert rank_layers(model, batches, drops=1).loss[0] <= measure_loss(model, batches).total + 1e-6


@pytest.mark.parametrize("score", EXPERT_SCORES)
def test_experts_that_are_never_chosen_score_nothing(batches, score):
    model = loud(SIX)
    unused = [1, 6]
    with torch.no_grad():
        for layer in range(6):
            model.feed_forward(layer).selection_bias[unused] = -100
    scores = score_experts(model, batches, score)
    assert (scores[:, unused] == 0).all()
    # Each modality gives a layer's experts the same total, one.
    assert scores.sum(-1).tolist() == pytest.approx([3.0] * 6)
    # Without them nothing changes at all.
    kept = SubNetwork(tuple(range(6)), best_experts(SIX, scores, 6), SIX.top_k)
    assert measure_loss(model, batches, kept).total == pytest.approx(measure_loss(model, batches).total)


def test_output_counts_what_usage_does_not(batches):
    model = loud(SIX)
    with torch.no_grad():
        model.feed_forward(3).down[5] = 0
        model.feed_forward(3).selection_bias[5] = 100
    assert score_experts(model, batches, "usage")[3].argmax() == 5
    assert score_experts(model, batches, "output")[3, 5] == 0


def test_usage_counts_the_choices_at_positions_that_predict(batches):
    model = loud(SIX)
    expected = torch.zeros(3, 6, 8, dtype=torch.float64)
    for batch in batches:
        routing = whole(SIX).routing()
        routing.keep_choices = True
        with torch.inference_mode():
            model(batch, routing=routing)
        for modality, at in enumerate((batch.text_at, batch.bits_at, batch.audio_at)):
            for layer, choices in routing.choices.items():
                expected[modality, layer] += torch.bincount(choices[at].flatten(), minlength=8)
    expected /= expected.sum(-1, keepdim=True)
    assert torch.allclose(score_experts(model, batches, "usage"), expected.sum(0))


def test_scoring_leaves_the_model_as_it_was(batches):
    model = loud(SIX)
    before = measure_loss(model, batches)
    score_experts(model, batches)
    assert measure_loss(model, batches) == before
    assert all("mix" not in model.feed_forward(layer).__dict__ for layer in range(6))


def test_selection_is_deterministic_and_within_what_was_asked(batches):
    model = loud(SIX)
    calls = []
    asked = {"depth": 0.5, "width": 0.5, "top_k": 1}
    chosen = select_subnetwork(model, batches, **asked, on_pass=lambda: calls.append(1))
    assert chosen == select_subnetwork(model, batches, **asked)
    assert len(chosen.layers) == 3 and {0, 5} <= set(chosen.layers)
    assert {len(ids) for ids in chosen.experts if ids is not None} == {4}
    assert chosen.top_k == 1
    assert len(calls) == selection_passes(SIX, 0.5, 0.5) == 4 + 3 + 2 + 1
    assert select_subnetwork(model, batches) == whole(SIX)
    with pytest.raises(InvalidInputError, match="leaves 1 of 6 layers"):
        select_subnetwork(model, batches, depth=0.2)


def test_controls_are_functions_of_the_seed():
    assert random_layers(SIX, 1) == random_layers(SIX, 1)
    assert {random_layers(SIX, seed).dropped for seed in range(9)} != {random_layers(SIX, 0).dropped}
    assert set(random_layers(SIX, 3).dropped) == {1, 2, 3, 4}
    assert torch.equal(random_experts(SIX, 2), random_experts(SIX, 2))
    assert not torch.equal(random_experts(SIX, 2), random_experts(SIX, 3))


def test_pools_share_the_active_experts_in_proportion():
    isolated = NANO.router.model_copy(update={"pool": "isolated", "isolated_experts": (6, 2, 4, 4)})
    config = NANO.model_copy(update={"experts": 16, "router": isolated})
    assert pool_counts(config, 8) == [3, 1, 2, 2]
    assert sum(pool_counts(config, 5)) == 5
    scores = torch.arange(16.0).expand(4, 16)
    assert best_experts(config, scores, 8)[0] == (3, 4, 5, 7, 10, 11, 14, 15)


def test_exact_answers_are_those_of_greedy_decoding():
    """Teacher forcing calls an answer right where greedy generation says the very same."""
    model = loud(SIX)
    rng = np.random.default_rng(2)
    prompts = [sequence(text(rng, "context", 3), name=str(number)) for number in range(6)]
    requests = [
        Request(str(number), prompt, GenerationParams(temperature=0, max_tokens=4))
        for number, prompt in enumerate(prompts)
    ]
    said = run(InferenceEngine(model, HASHES, capacity=1, max_length=100), *requests)
    samples, expected = [], 0
    for number, prompt in enumerate(prompts):
        events = said[str(number)]
        ids = [event.token for event in events[:-1]]
        # A begun medium is no text; only answers that end by themselves can be right to the last step.
        whole_answer = events[-1].finish_reason == "stop" and all(VOCABULARY.is_text(token) for token in ids)
        codes = np.array(ids if whole_answer else [0, 1], np.int32)
        span = TokenSpan("text", SequenceLayout(NANO.text_vocabulary), codes, "t")
        samples.append(TokenSequence(prompt.sample_id, (*prompt.segments, TokenSegment(span, "target"))))
        expected += whole_answer
    rows = [lay_out(sample, SIX, VOCABULARY) for sample in samples]
    batch = pack([rows], sum(map(len, rows)), SIX)
    exact = measure_loss(model, [batch]).exact
    assert exact is not None and exact * len(prompts) >= expected
