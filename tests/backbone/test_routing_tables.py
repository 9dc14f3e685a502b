"""Routing tables: their figures by hand, their counts on a model, their picture, and the rank correlation."""

import io

import numpy as np
import pytest
from PIL import Image
from scipy.stats import spearmanr

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.elastic.subnetwork import choose_subnetwork
from ernie5.backbone.evaluation.allocation import TokenCosts, _spearman, rank_correlation, token_costs
from ernie5.backbone.evaluation.routing import RoutingTable, calibration_rows, observe, routing_table
from ernie5.backbone.evaluation.routing_plots import routing_png
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.next_group import loss_sums
from ernie5.backbone.rows import GROUPS
from tests.backbone.samples import NANO, VOCABULARY, mixed


def rows(config: BackboneConfig, count: int = 20, length: int = 64):
    rng = np.random.default_rng(0)
    return calibration_rows(
        [lay_out(mixed(rng, kind), config, VOCABULARY) for kind in range(count)], config, length=length
    )


def test_figures_of_a_table_by_hand():
    use = np.zeros((3, 2, 8), np.int64)
    use[0, 0] = [5, 5, 5, 5, 5, 5, 5, 5]
    use[1, 0] = [20, 0, 10, 10, 0, 0, 0, 0]
    use[0, 1] = [9, 8, 1, 0, 0, 0, 0, 0]
    use[1, 1] = [0, 8, 9, 1, 0, 0, 0, 0]
    table = RoutingTable(use, np.array([20, 20, 0]), ("text", "audio", "none"), (0, 1))
    np.testing.assert_allclose(table.entropy()[:2, 0], [1.0, 0.5])
    assert np.isnan(table.entropy()[2]).all()
    # The top quarter of eight experts is two: {0, 1} and {1, 2} share one of three.
    np.testing.assert_allclose(table.overlap()[1, :2, :2], [[1, 1 / 3], [1 / 3, 1]])
    assert np.isnan(table.overlap()[:, 2]).all()
    assert table.dead().tolist() == [0, 4]
    np.testing.assert_allclose(table.busiest(), [25 / 10, 16 / (36 / 8)])
    np.testing.assert_allclose(table.experts_per_token()[:2], [[2, 0.9], [2, 0.9]])
    plain = table.as_json()
    assert plain["entropy"][2] == [None, None] and plain["overlap"][1][0][1] == 0.3333


def test_a_table_counts_every_real_token_once_a_slot():
    model = Backbone(NANO).eval()
    batches = rows(NANO)
    table = routing_table(model, batches)
    lengths = sum(sum(sum(row) for row in batch.lengths) for batch in batches)
    assert table.tokens.sum() == lengths and (table.tokens > 0).all()
    assert (table.use.sum(-1) == table.tokens[:, None] * NANO.top_k).all()
    assert table.layers == tuple(range(NANO.layers)) and table.groups == GROUPS


def test_a_table_of_a_sub_network_shows_only_its_layers_and_experts():
    model = Backbone(NANO).eval()
    chosen = choose_subnetwork(model, depth=0.5, width=0.5, top_k=1)
    table = routing_table(model, rows(NANO), chosen)
    assert table.layers == chosen.layers
    for layer in range(NANO.layers):
        used = set(table.use[:, layer].sum(0).nonzero()[0].tolist())
        assert used <= set(chosen.experts[layer] or ()) if layer in chosen.layers else not used
    assert (table.dead()[list(chosen.layers)] >= NANO.experts // 2).all()
    assert routing_png(table).startswith(b"\x89PNG")


def test_isolated_kinds_have_nothing_in_common():
    config = BackboneConfig.model_validate(NANO.model_dump() | {"router": {"pool": "isolated"}})
    overlap = routing_table(Backbone(config).eval(), rows(config)).overlap()
    assert (overlap == np.eye(len(GROUPS))).all()


def test_the_picture_is_one_of_some_size():
    picture = Image.open(io.BytesIO(routing_png(routing_table(Backbone(NANO).eval(), rows(NANO)), "nano")))
    assert picture.size == (1320, 1100)
    assert len(picture.convert("L").getcolors()) > 50


def test_token_costs_add_up_to_the_training_loss():
    model = Backbone(NANO).eval()
    batches = rows(NANO)
    costs = token_costs(model, batches)
    assert set(costs) == {"text", "vision", "audio"}
    audio = sum(
        float(loss_sums(outputs, batch).total["audio"]) for batch, outputs, _, _ in observe(model, batches)
    )
    assert float(costs["audio"].loss.sum()) * NANO.audio_levels == pytest.approx(audio, rel=1e-5)
    assert (costs["text"].experts == NANO.top_k).all()
    assert len(costs["text"].loss) == sum(len(batch.text_at) for batch in batches)


def test_experts_of_a_prediction_are_those_of_its_position():
    router = {"allocation": {"policy": "threshold", "budget": 2.0}}
    config = BackboneConfig.model_validate(NANO.model_dump() | {"top_k": 6, "router": router})
    model = Backbone(config).eval()
    for index in range(config.layers):
        model.feed_forward(index).price_limit.fill_(0.4)
    batches = rows(config)
    costs = token_costs(model, batches)["text"]
    batch, _, routing, _ = next(iter(observe(model, batches)))
    by_hand = [
        np.mean([int((routing.choices[layer][at] >= 0).sum()) for layer in range(config.layers)])
        for at in batch.text_at.tolist()
    ]
    np.testing.assert_allclose(costs.experts[: len(by_hand)], by_hand)
    assert len(np.unique(costs.experts)) > 2


def test_the_rank_correlation_is_spearmans():
    rng = np.random.default_rng(1)
    experts = rng.integers(1, 5, 400) / 2
    loss = experts + rng.standard_normal(400)
    found = rank_correlation(TokenCosts(loss, experts, np.arange(400) // 8), draws=300)
    assert found.rho == pytest.approx(spearmanr(experts, loss).statistic)
    assert found.low < found.rho < found.high and found.low > 0
    assert (found.tokens, found.samples) == (400, 50)
    # A weight of n is n copies.
    weight = rng.integers(0, 4, 400)
    _, a = np.unique(experts, return_inverse=True)
    _, b = np.unique(loss, return_inverse=True)
    copies = spearmanr(np.repeat(experts, weight), np.repeat(loss, weight)).statistic
    assert _spearman(a, b, weight.astype(float)) == pytest.approx(copies)


def test_the_interval_covers_what_it_should():
    """Of 200 intervals of unrelated values about one in twenty misses 0; tokens of a sample are alike."""
    rng = np.random.default_rng(2)
    missed = 0
    for number in range(200):
        sample = np.repeat(np.arange(40), 5)
        experts = np.round(rng.standard_normal(40)[sample], 1)
        loss = rng.standard_normal(40)[sample] + 0.3 * rng.standard_normal(200)
        found = rank_correlation(TokenCosts(loss, experts, sample), draws=200, seed=number)
        missed += not found.low <= 0 <= found.high
    assert 2 <= missed <= 24
    with pytest.raises(ValueError, match="two samples"):
        rank_correlation(TokenCosts(np.ones(5), np.ones(5), np.zeros(5)))
