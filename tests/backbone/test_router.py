"""The router: golden default choices, isolated pools, warm-up in turn, balance and its losses."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig, RouterConfig
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model import experts as experts_module
from ernie5.backbone.model.router import (
    Routing,
    account,
    bias_step,
    decide,
    group_mask,
    orthogonality,
    round_robin_share,
)
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import GROUPS, pack
from tests.backbone.samples import NANO, VOCABULARY, mixed

TOKENS, SAMPLES, LAYERS, EXPERTS, TOP_K = 60, 5, 3, 12, 3


def configured(**changes) -> BackboneConfig:
    return BackboneConfig.model_validate(NANO.model_dump() | changes)


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    bias = 0.1 * torch.randn(EXPERTS, generator=generator)
    return logits, bias, torch.randint(0, SAMPLES, (TOKENS,), generator=generator)


def plain_choice(logits, bias, score, allowed, limit):
    """Token by token: the best biased scores, weighted by the scores themselves."""
    chosen, weights = [], []
    for token in range(len(logits)):
        scores = torch.softmax(logits[token], -1) if score == "softmax" else torch.sigmoid(logits[token])
        ranked = scores + bias
        if allowed is not None:
            ranked = torch.where(allowed[token], ranked, -torch.inf)
        expert = ranked.argsort(descending=True, stable=True)[:TOP_K]
        weight = scores[expert] * (torch.arange(TOP_K) < (TOP_K if limit is None else limit[token]))
        chosen.append(expert)
        weights.append(weight / weight.sum())
    return torch.stack(chosen), torch.stack(weights)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_default_choices_are_the_best_biased_scores_weighted_without_the_bias(score, masked):
    logits, bias, sample = inputs(1)
    routing = Routing(sample=sample)
    allowed = limit = None
    if masked:
        generator = torch.Generator().manual_seed(2)
        routing.expert_mask = torch.rand(SAMPLES, LAYERS, EXPERTS, generator=generator) < 0.6
        routing.expert_mask[..., :TOP_K] = True
        routing.top_k = torch.randint(1, TOP_K + 1, (SAMPLES, LAYERS), generator=generator)
        allowed, limit = routing.expert_mask[sample, 1], routing.top_k[sample, 1]
    decision = decide(logits, bias, RouterConfig(score=score), routing, 1, top_k=TOP_K)
    expert, weight = plain_choice(logits, bias, score, allowed, limit)
    assert torch.equal(decision.expert, expert)
    torch.testing.assert_close(decision.weight, weight, rtol=0, atol=1e-6)
    assert (decision.valid is None) == (not masked)


def test_default_weights_and_names_are_those_of_earlier_checkpoints():
    """Options that are off leave no trace in a checkpoint."""
    names = {name for name in Backbone(NANO).layers[0].feed_forward.state_dict()}
    assert names == {"router", "selection_bias", "gate_up", "down"}
    assert Backbone(NANO).layers[0].feed_forward.selection_bias.dtype == torch.float32
    old = NANO.model_dump()
    for name in ("pool", "isolated_experts", "orthogonality_weight", "round_robin_steps", "allocation"):
        del old["router"][name]
    for name in ("depth_scope", "width_scope", "top_k_range", "top_k_scope"):
        del old["elastic"][name]
    assert BackboneConfig.model_validate(old) == NANO


def test_each_kind_of_position_uses_its_own_experts_only():
    config = configured(
        router={"pool": "isolated", "isolated_experts": (2, 2, 2, 2), "auxiliary_weight": 0.1}
    )
    rng = np.random.default_rng(0)
    batch = pack([[lay_out(mixed(rng, kind), config, VOCABULARY) for kind in range(4)]], 128, config)
    routing = Routing(
        group=batch.group.flatten(), keep_choices=True, counted=torch.ones(128, dtype=torch.bool)
    )
    model = Backbone(config)
    model(batch, routing=routing)
    own = group_mask(config)
    assert own.sum() == config.experts
    for choices in routing.choices.values():
        for kind in range(len(GROUPS)):
            chosen = choices[routing.group == kind].flatten()
            assert len(chosen) and set(chosen.tolist()) <= set(own[kind].nonzero().flatten().tolist())
    # A batch tells the kinds by itself; tokens alone don't.
    assert torch.equal(model(batch).hidden, model(batch, routing=Routing(group=routing.group)).hidden)
    with pytest.raises(ValueError, match=r"Routing\.group"):
        model.feed_forward(0)(torch.zeros(4, config.width), Routing(), 0)


def test_an_isolated_pool_meets_width_masks_and_fixed_sub_networks():
    logits, bias, sample = inputs(3)
    config = configured(experts=EXPERTS, router={"pool": "isolated"})
    groups = group_mask(config)
    kind = torch.arange(TOKENS) % 4
    mask = torch.zeros(SAMPLES, LAYERS, EXPERTS, dtype=torch.bool)
    mask[..., [0, 1, 3, 4, 6, 7, 9, 10]] = True
    routing = Routing(expert_mask=mask, sample=sample, group=kind)
    decision = decide(logits, bias, config.router, routing, 0, top_k=2, groups=groups)
    assert decision.valid is None
    assert torch.equal(decision.expert // 3, kind[:, None].expand(-1, 2))
    assert mask[0, 0][decision.expert].all()
    # A kind with fewer experts than k uses what it has; one without any is an error.
    active = torch.tensor([0, 3, 4, 6, 7, 9, 10])
    routing = Routing(group=kind)
    fewer = decide(
        logits[:, active], bias[active], config.router, routing, 0, top_k=2, groups=groups[:, active]
    )
    assert fewer.valid is not None and torch.equal(fewer.valid.sum(-1), torch.where(kind == 0, 1, 2))
    torch.testing.assert_close(fewer.weight.sum(-1), torch.ones(TOKENS))
    with pytest.raises(ValueError, match=r"no expert for kinds of position \[0\]"):
        decide(logits[:, 3:], bias[3:], config.router, routing, 0, top_k=2, groups=groups[:, 3:])


def test_no_token_is_dropped():
    logits, bias, _ = inputs(4)
    logits[:, 0] += 20  # all want one expert
    routing = Routing(counted=torch.ones(TOKENS, dtype=torch.bool))
    account(decide(logits, bias, RouterConfig(), routing, 0, top_k=TOP_K), RouterConfig(), routing, 0)
    assert routing.load[0][0] == TOKENS and routing.load[0].sum() == TOKENS * TOP_K


@pytest.mark.parametrize("isolated", [False, True])
def test_the_warm_up_gives_every_allowed_expert_its_turn(isolated):
    config = configured(experts=EXPERTS, router={"pool": "isolated" if isolated else "shared"})
    groups = group_mask(config) if isolated else None
    logits = torch.zeros(TOKENS, EXPERTS, requires_grad=True)
    biased = torch.linspace(1, 0, EXPERTS)  # without turns all tokens would go to the first ones
    counted = torch.ones(TOKENS, dtype=torch.bool)
    routing = Routing(round_robin=1.0, turn=5, group=torch.arange(TOKENS) % 4, counted=counted)
    decision = decide(logits, biased, config.router, routing, 1, top_k=2, groups=groups)
    account(decision, config.router, routing, 1, groups)
    assert routing.load[1].min() == routing.load[1].max() == TOKENS * 2 // EXPERTS
    assert all(len(set(row)) == 2 for row in decision.expert.tolist())
    if isolated:
        assert torch.equal(decision.expert // 3, routing.group[:, None].expand(-1, 2))
    # The router learns from the weights meanwhile.
    (decision.weight[:, 0] * torch.arange(TOKENS)).sum().backward()
    assert logits.grad.abs().sum() > 0


def test_turns_keep_to_the_mask_of_a_sample():
    logits, bias, sample = inputs(5)
    mask = torch.rand(SAMPLES, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(6)) < 0.5
    mask[..., :2] = True
    routing = Routing(round_robin=1.0, expert_mask=mask, sample=sample)
    decision = decide(logits, bias, RouterConfig(), routing, 2, top_k=2)
    assert mask[sample, 2].gather(1, decision.expert).all()


def test_the_warm_up_hands_over_little_by_little():
    assert [round_robin_share(step, 10) for step in (0, 9, 10, 15, 20, 99)] == [1, 1, 1, 0.5, 0, 0]
    assert round_robin_share(0, 0) == 0
    logits, bias, _ = inputs(7)
    plain = decide(logits, bias, RouterConfig(), Routing(), 0, top_k=2).expert
    half = decide(logits, bias, RouterConfig(), Routing(round_robin=0.5), 0, top_k=2).expert
    kept = (plain == half).all(-1).float().mean()
    assert 0.4 < kept < 0.65


def test_the_balance_moves_bias_towards_idle_experts_of_the_same_pool():
    load = torch.tensor([9, 1, 0, 0, 80, 80, 100, 60])
    assert bias_step(load).tolist() == [1, 1, 1, 1, -1, -1, -1, -1]
    own = group_mask(configured(router={"pool": "isolated"}))
    assert bias_step(load, list(own)).tolist() == [-1, 1, 0, 0, 0, 0, -1, 1]


def test_only_full_width_tokens_count_for_the_balance():
    logits, bias, sample = inputs(8)
    mask = torch.ones(SAMPLES, LAYERS, EXPERTS, dtype=torch.bool)
    mask[1:3, :, TOP_K:] = False
    counted = torch.arange(TOKENS) % 7 > 0
    routing = Routing(expert_mask=mask, sample=sample, counted=counted)
    decision = decide(logits, bias, RouterConfig(), routing, 0, top_k=TOP_K)
    account(decision, RouterConfig(), routing, 0)
    whole = counted & (sample != 1) & (sample != 2)
    expected = torch.bincount(decision.expert[whole].flatten(), minlength=EXPERTS)
    assert torch.equal(routing.load[0], expected) and 0 < whole.sum() < counted.sum()


def test_auxiliary_losses_have_their_known_values():
    config = RouterConfig(auxiliary_weight=1.0, z_weight=1.0)
    counted = torch.ones(TOKENS, dtype=torch.bool)
    even, uneven = Routing(counted=counted, round_robin=1.0), Routing(counted=counted)
    logits = torch.zeros(TOKENS, EXPERTS)
    account(decide(logits, torch.zeros(EXPERTS), config, even, 0, top_k=2), config, even, 0)
    torch.testing.assert_close(even.auxiliary[0], torch.tensor(1.0))
    torch.testing.assert_close(even.auxiliary[1], torch.tensor(float(np.log(EXPERTS)) ** 2))
    logits[:, 0] = 30.0
    account(decide(logits, torch.zeros(EXPERTS), config, uneven, 0, top_k=1), config, uneven, 0)
    torch.testing.assert_close(uneven.auxiliary[0], torch.tensor(float(EXPERTS)))


def test_router_rows_are_orthogonal_or_pay():
    assert orthogonality(torch.eye(4, 8)) == 0
    torch.testing.assert_close(orthogonality(torch.ones(4, 8)), torch.tensor(12 / 16))
    config = configured(router={"orthogonality_weight": 0.5})
    rng = np.random.default_rng(1)
    batch = pack([[lay_out(mixed(rng, 0), config, VOCABULARY)]], 64, config)
    model = Backbone(config)
    routing = Routing(counted=torch.ones(64, dtype=torch.bool))
    model(batch, routing=routing)
    assert len(routing.auxiliary) == config.layers
    torch.testing.assert_close(routing.auxiliary[1], 0.5 * orthogonality(model.feed_forward(1).router))


def test_rows_of_closed_slots_are_never_computed(monkeypatch):
    """Counts the rows that reach the experts: a reduced k saves them."""
    rows = []
    inner = experts_module.sparse_swiglu

    def counting(x, gate_up, down, expert, weight, valid=None):
        rows.append(expert.numel() if valid is None else int(valid.sum()))
        return inner(x, gate_up, down, expert, weight, valid)

    monkeypatch.setattr(experts_module, "sparse_swiglu", counting)
    rng = np.random.default_rng(2)
    batch = pack([[lay_out(mixed(rng, kind), NANO, VOCABULARY) for kind in (0, 4)]], 64, NANO)
    sample = batch.sample.flatten()
    top_k = torch.full((batch.samples, NANO.layers), NANO.top_k)
    top_k[0] = 1
    Backbone(NANO)(batch, routing=Routing(top_k=top_k, sample=sample))
    assert rows == [64 * NANO.top_k - int((sample == 0).sum())] * NANO.layers


def test_inconsistent_options_are_refused():
    with pytest.raises(ValueError, match="isolated_experts"):
        configured(router={"pool": "isolated", "isolated_experts": (1, 3, 2, 2)})
    with pytest.raises(ValueError, match="isolated_experts"):
        configured(router={"pool": "isolated", "isolated_experts": (2, 2, 2, 3)})
    assert (
        F.one_hot(torch.tensor(configured(experts=10, router={"pool": "isolated"}).expert_shares)).sum() == 4
    )
