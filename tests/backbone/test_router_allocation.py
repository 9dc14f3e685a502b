"""Experts a token by need: the two policies by definition, and the controller that holds their mean."""

import numpy as np
import pytest
import torch

from ernie5.backbone.config import AllocationConfig, BackboneConfig, ElasticConfig, RouterConfig
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.allocation import BINS, count_prices, fitting_limit, open_slots
from ernie5.backbone.model.balance import RoutingSums
from ernie5.backbone.model.experts import SparseFeedForward
from ernie5.backbone.model.router import Routing, decide
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import pack
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from tests.backbone.samples import NANO, VOCABULARY, mixed

EXPERTS, TOP_K = 16, 8


def configured(policy: str, **changes) -> BackboneConfig:
    allocation = {"policy": policy, "budget": 3.0} | changes.pop("allocation", {})
    router = {"allocation": allocation} | changes.pop("router", {})
    return BackboneConfig.model_validate(
        NANO.model_dump() | {"experts": EXPERTS, "top_k": TOP_K, "router": router} | changes
    )


def logits_of(seed: int, tokens: int = 200, experts: int = EXPERTS) -> torch.Tensor:
    """Some tokens sure of their expert, some not."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator) * torch.linspace(0.1, 3, tokens)[:, None]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("least", [1, 2])
def test_the_threshold_opens_the_fewest_experts_that_reach_it(score, least):
    logits, limit = logits_of(0), 0.45
    allocation = AllocationConfig(policy="threshold", budget=3, least=least)
    config = RouterConfig(score=score, allocation=allocation)
    bias = 0.05 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(9))
    price = torch.tensor([-np.log(1 - limit)])
    decision = decide(logits, bias, config, Routing(), 0, top_k=TOP_K, slots=TOP_K, limit=price)
    scores = torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)
    share = scores / scores.sum(-1, keepdim=True)
    best = share.sort(-1, descending=True).values
    for token in range(len(logits)):
        needed = 1
        while needed < TOP_K and best[token, :needed].sum() < limit:
            needed += 1
        assert decision.needed[token] == max(needed, least), token
        assert decision.valid[token].sum() == decision.needed[token]
        # The selection bias says which experts, not how many.
        kept = share[token, (scores[token] + bias).argsort(descending=True)[: decision.needed[token]]]
        torch.testing.assert_close(decision.weight[token][decision.valid[token]], kept)
    assert decision.needed.unique().numel() > 3


@pytest.mark.parametrize("least", [1, 3])
def test_null_experts_win_the_slots_they_would_win_in_one_ranking(least):
    logits, null_logits, null_bias = logits_of(1), logits_of(2, experts=7), 0.3
    bias = 0.02 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3))
    allocation = AllocationConfig(policy="null", budget=3, least=least, null_experts=7)
    config = RouterConfig(allocation=allocation)
    limit = torch.tensor([-null_bias])
    decision = decide(
        logits, bias, config, Routing(), 0, top_k=TOP_K, slots=TOP_K, null_logits=null_logits, limit=limit
    )
    scores = torch.softmax(torch.cat((logits, null_logits), -1), -1)
    ranked = scores.log() + torch.cat((torch.zeros(EXPERTS), torch.full((7,), null_bias)))
    for token in range(len(logits)):
        order = ranked[token].argsort(descending=True)[: least + 7]
        real = [index for index in order.tolist() if index < EXPERTS]
        assert len(real) >= least
        needed = min(len(real), TOP_K)
        assert decision.needed[token] == needed, token
        # The selection bias says which experts, not how many.
        chosen = (scores[token, :EXPERTS] + bias).argsort(descending=True)[:needed]
        assert set(decision.expert[token, :needed].tolist()) == set(chosen.tolist())
        whole = scores[token, order[: least + 7]].sum()
        torch.testing.assert_close(decision.weight[token, :needed], scores[token, chosen] / whole)
    assert decision.needed.unique().numel() > 3


def test_the_fitting_limit_meets_the_budget():
    generator = torch.Generator().manual_seed(4)
    for policy, budget in (("threshold", 1.0), ("threshold", 2.5), ("threshold", 8.0), ("null", 3.25)):
        allocation = AllocationConfig(policy=policy, budget=budget, by_kind=False)
        price = torch.rand(3000, TOP_K, generator=generator).sort(-1).values
        (histogram,) = count_prices(price, allocation)
        limit = fitting_limit(histogram, allocation, TOP_K)
        mean = open_slots(price, torch.tensor(limit), 1).double().mean()
        assert abs(mean - budget) < 0.02 * budget
    assert fitting_limit(torch.zeros(BINS, dtype=torch.int64), allocation, TOP_K) is None


@pytest.mark.parametrize("policy", ["threshold", "null"])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_the_controller_holds_the_mean_though_the_inputs_change(policy, scope):
    config = configured(policy, allocation={"scope": scope, "by_kind": False})
    layers = [SparseFeedForward(config) for _ in range(config.layers)]
    generator = torch.Generator().manual_seed(5)
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.data = 0.1 * (number + 1) * torch.randn(parameter.shape, generator=generator)
    means, by_layer = [], []
    for step in range(160):
        scale = 0.5 if step < 80 else 2.0  # tokens become surer all at once
        routing = Routing(counted=torch.ones(256, dtype=torch.bool))
        for index, layer in enumerate(layers):
            layer(scale * torch.randn(256, config.width, generator=generator), routing, index)
        sums = RoutingSums.of(config, [routing])
        means.append(sums.experts_per_token())
        by_layer.append((sums.opened[:, 0] / sums.opened[:, 1]).tolist())
        sums.update(config, layers)
    for end in (80, 160):
        assert abs(np.mean(means[end - 20 : end]) - 3.0) < 0.05 * 3.0
    late = np.mean(by_layer[-20:], axis=0)
    if scope == "layer":
        assert np.abs(late - 3.0).max() < 0.05 * 3.0
    else:
        assert late.max() - late.min() > 0.5  # layers compete for the budget
        assert len({float(layer.price_limit) for layer in layers}) == 1


@pytest.mark.parametrize("policy", ["threshold", "null"])
def test_a_budget_held_by_kind_holds_for_other_mixes(policy):
    generator = torch.Generator().manual_seed(7)
    # Each kind has a spread of its own: routers are surer of the later ones.
    spread = torch.tensor([0.3, 1.0, 2.0, 4.0])

    def tokens(*counts: int) -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.arange(4).repeat_interleave(torch.tensor(counts))
        return torch.randn(len(kind), NANO.width, generator=generator) * spread[kind, None], kind

    means = {}
    for by_kind in (True, False):
        config = configured(policy, layers=2, allocation={"by_kind": by_kind})
        layer = SparseFeedForward(config)
        for number, parameter in enumerate(layer.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data = 0.2 * noise
        for _ in range(40):
            x, kind = tokens(700, 100, 150, 50)
            routing = Routing(counted=torch.ones(len(x), dtype=torch.bool), group=kind)
            layer(x, routing, 0)
            layer.hold_budget(routing.prices[0])
        x, kind = tokens(300, 300, 300, 2100)
        routing = Routing(keep_choices=True, group=kind)
        layer(x, routing, 0)
        means[by_kind] = float((routing.choices[0] >= 0).sum(-1).double().mean())
    assert abs(means[True] - 3.0) < 0.05 * 3.0
    assert abs(means[False] - 3.0) > 0.05 * 3.0


def test_a_budget_held_by_kind_needs_to_know_the_kinds():
    layer = SparseFeedForward(configured("threshold"))
    with pytest.raises(ValueError, match=r"needs Routing\.group"):
        layer(torch.zeros(4, NANO.width), Routing(), 0)


@pytest.mark.parametrize("policy", ["threshold", "null"])
def test_the_router_learns_also_where_one_expert_is_chosen(policy):
    config = configured(policy, allocation={"budget": 1.0})
    layer = SparseFeedForward(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    layer.price_limit.fill_(-99.0)  # nothing is that cheap
    routing = Routing(keep_choices=True, group=torch.arange(20) % 4)
    layer(torch.randn(20, config.width), routing, 0).square().sum().backward()
    assert ((routing.choices[0] >= 0).sum(-1) == 1).all()
    assert layer.router.grad.abs().sum() > 0
    if layer.null_router is not None:
        assert layer.null_router.grad.abs().sum() > 0


@pytest.mark.parametrize("policy", ["threshold", "null"])
def test_a_sub_networks_own_k_cuts_what_a_token_needs(policy):
    config = configured(policy)
    rng = np.random.default_rng(6)
    batch = pack([[lay_out(mixed(rng, kind), config, VOCABULARY) for kind in range(3)]], 96, config)
    model = Backbone(config).eval()
    sample = batch.sample.flatten()
    drawn = torch.full((batch.samples, config.layers), 2)
    with torch.no_grad():
        for index in range(config.layers):
            limit = model.feed_forward(index).price_limit
            limit.fill_(-0.2 if policy == "null" else 0.25)
        whole = Routing(keep_choices=True)
        model(batch, routing=whole)
        fixed = Routing(keep_choices=True, fixed_top_k=[2] * config.layers)
        out_fixed = model(batch, routing=fixed).hidden
        masked = Routing(keep_choices=True, top_k=drawn, sample=sample)
        out_masked = model(batch, routing=masked).hidden
    needed = (whole.choices[0] >= 0).sum(-1)
    assert needed.unique().numel() > 1
    assert torch.equal((fixed.choices[0] >= 0).sum(-1), needed.clamp(max=2))
    assert torch.equal(masked.choices[0][:, :2], fixed.choices[0])
    torch.testing.assert_close(out_fixed, out_masked, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["threshold", "null"])
def test_limits_survive_a_checkpoint_and_training_goes_on_to_the_bit(policy, tmp_path):
    config = configured(policy, router={"auxiliary_weight": 0.01, "score": "sigmoid"})
    training = TrainingConfig(
        steps=4, rows=2, row_length=96, warmup=2, checkpoint_every=2, threads=1, keep_checkpoints=9
    )

    def stream(position):
        while True:
            yield position, mixed(np.random.default_rng(position), position)
            position += 1

    whole = Trainer(config, training, tmp_path / "whole", {})
    reports = list(whole.run(stream(0)))
    assert all(1 <= report.experts_per_token <= TOP_K for report in reports)
    part = Trainer(config, training, tmp_path / "part", {})
    next(report for report in part.run(stream(0)) if report.step == 2)
    again = Trainer(config, training, tmp_path / "part", {})
    assert again.resume()
    list(again.run(stream(again.position)))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    limits = [whole.model.feed_forward(index).price_limit.tolist() for index in range(config.layers)]
    assert len({limit for layer in limits for limit in layer}) > 4


def test_a_fixed_allocation_reports_no_mean(tmp_path):
    training = TrainingConfig(steps=1, rows=1, row_length=96, threads=1)
    samples = ((position, mixed(np.random.default_rng(position), 4)) for position in range(99))
    (report,) = Trainer(NANO, training, tmp_path, {}).run(samples)
    assert report.experts_per_token is None


def test_impossible_budgets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="null_experts"):
        configured("null", allocation={"null_experts": 3})
    greedy = configured("threshold", allocation={"budget": 9.0}, elastic=ElasticConfig.off().model_dump())
    with pytest.raises(ValueError, match="budget of 9"):
        Trainer(greedy, TrainingConfig(), tmp_path, {})
