"""Limits of a dynamic allocation fitted to rows that were not trained on."""

import numpy as np
import pytest
import torch

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.elastic.budget import fit_budget, mean_experts
from ernie5.backbone.evaluation.routing import calibration_rows, routing_table
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError
from tests.backbone.samples import NANO, VOCABULARY, mixed


def model_of(policy: str, **allocation) -> Backbone:
    router = {"allocation": {"policy": policy, "budget": 3.0} | allocation}
    model = Backbone(
        BackboneConfig.model_validate(NANO.model_dump() | {"top_k": 6, "router": router}), seed=1
    )
    with torch.no_grad():
        for index in range(NANO.layers):
            model.feed_forward(index).router *= 20  # sure of some tokens
            if model.feed_forward(index).null_router is not None:
                model.feed_forward(index).null_router *= 20
    return model.eval()


def rows_of(seed: int, config: BackboneConfig, kinds=range(10), samples: int = 80):
    rng = np.random.default_rng(seed)
    chosen = [mixed(rng, kinds[number % len(kinds)]) for number in range(samples)]
    return calibration_rows((lay_out(sample, config, VOCABULARY) for sample in chosen), config, length=256)


@pytest.mark.parametrize("policy", ["threshold", "null"])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_other_rows_get_the_budget(policy, scope):
    model = model_of(policy, scope=scope)
    rows, others = rows_of(0, model.config), rows_of(1, model.config)
    before = mean_experts(model, others)
    fit_budget(model, rows)
    assert abs(before - 3.0) > 0.05 * 3.0
    assert mean_experts(model, rows) == pytest.approx(3.0, rel=0.01)
    assert mean_experts(model, others) == pytest.approx(3.0, rel=0.05)
    # The mean is that of the choices, and each kind of position has the budget.
    table = routing_table(model, others)
    count = float(table.use.sum() / table.tokens.sum() / model.config.layers)
    assert mean_experts(model, others) == pytest.approx(count)
    np.testing.assert_allclose(np.nanmean(table.experts_per_token(), axis=1), 3.0, rtol=0.1)


def test_kinds_that_do_not_occur_keep_their_limits():
    model = model_of("threshold")
    before = [model.feed_forward(index).price_limit.clone() for index in range(NANO.layers)]
    fit_budget(model, rows_of(0, model.config, kinds=[4]))  # text alone
    for index, limits in enumerate(before):
        after = model.feed_forward(index).price_limit
        assert after[0] != limits[0] and torch.equal(after[1:], limits[1:])


def test_a_fixed_allocation_and_no_rows_are_refused():
    with pytest.raises(InvalidInputError, match="no budget to fit"):
        fit_budget(Backbone(NANO), rows_of(0, NANO))
    with pytest.raises(InvalidInputError, match="no samples"):
        fit_budget(model_of("threshold"), [])
    assert mean_experts(Backbone(NANO), rows_of(0, NANO, samples=5)) is None
