"""Choices of a training run by name: they give the table's columns, and impossible ones say why."""

from __future__ import annotations

import pytest

from ernie5.backbone.config import BackboneConfig, ElasticConfig, preset
from ernie5.backbone.elastic.options import (
    ALLOCATION_TENSORS,
    DRAWS,
    POLICIES,
    with_allocation,
    with_draws,
)
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError

MINI = preset("mini")


def test_draws_are_the_columns_of_the_table():
    assert DRAWS == ("own", "article", "report", "off")
    assert with_draws(MINI, "own") == MINI
    article = with_draws(MINI, "article").elastic
    assert (article.depth_scope, article.depth_range, article.top_k_range) == ("batch", (0.3, 0.7), (1, 1))
    report = with_draws(MINI, "report").elastic
    assert report == ElasticConfig.report(8, 1) and report.depth_range == (0.25, 1.0)
    off = with_draws(MINI, "off").elastic
    assert off.depth_probability == off.width_probability == off.top_k_probability == 0
    for name in DRAWS:
        changed = with_draws(preset("base"), name)
        assert changed.model_dump(exclude={"elastic"}) == preset("base").model_dump(exclude={"elastic"})


def test_allocation_changes_its_policy_and_budget_alone():
    chosen = with_allocation(MINI, "threshold", 2.5).router.allocation
    assert (chosen.policy, chosen.budget) == ("threshold", 2.5)
    again = with_allocation(with_allocation(MINI, "threshold", 2.5), mean_experts=3)
    assert (again.router.allocation.policy, again.router.allocation.budget) == ("threshold", 3)
    assert with_allocation(again, "fixed").router.allocation.policy == "fixed"
    assert with_allocation(MINI) == MINI
    for policy in POLICIES:
        assert with_allocation(MINI, policy).elastic == MINI.elastic


@pytest.mark.parametrize(
    "config,choose,message",
    [
        (MINI, lambda c: with_draws(c, "articel"), "'articel'; known: own, article, report, off"),
        (preset("nano"), lambda c: with_draws(c, "article"), "raise depth_range to 0.5"),
        (MINI.model_copy(update={"top_k": 1}), lambda c: with_allocation(c, "null"), "outside \\[1, 1\\]"),
        (MINI, lambda c: with_allocation(c, "some"), "'some'; known: fixed, threshold, null"),
        (MINI, lambda c: with_allocation(c, "fixed", 2), "gives every token 4 experts"),
        (MINI, lambda c: with_allocation(c, mean_experts=2), "take allocation threshold or null"),
        (MINI, lambda c: with_allocation(c, "threshold", 4.5), "4.5 experts a token is outside \\[1, 4\\]"),
        (MINI, lambda c: with_allocation(c, "threshold", 0.5), "router.allocation.budget: .* 1"),
        (MINI, lambda c: with_allocation(c, "threshold", float("nan")), "budget"),
        (
            BackboneConfig(experts=32, top_k=16),
            lambda c: with_allocation(c, "null"),
            "8 null experts can't empty the 15 slots",
        ),
    ],
)
def test_the_impossible_is_refused_with_its_reason(config, choose, message):
    with pytest.raises(InvalidInputError, match=message):
        choose(config)


def test_only_these_tensors_hang_on_the_policy():
    """A run that begins with a folder's weights leaves them as they are; all others must be there."""

    def names(policy: str) -> set[str]:
        return set(Backbone(with_allocation(preset("nano"), policy)).state_dict())

    for policy in POLICIES[1:]:
        more = names(policy) - names("fixed")
        assert more and {name.rpartition(".")[2] for name in more} <= set(ALLOCATION_TENSORS)
        assert not names("fixed") - names(policy)
