"""Draws of sub-networks: scopes, ranges and presets, and that what is left out costs nothing."""

import numpy as np
import pytest
import torch

from ernie5.backbone.config import PRESETS, BackboneConfig, ElasticConfig, preset
from ernie5.backbone.elastic.draws import StepDraws, draw_layers, draw_top_k, draw_width
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model import experts as experts_module
from ernie5.backbone.model.transformer import Block
from ernie5.backbone.rows import pack
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from tests.backbone.samples import NANO, VOCABULARY, mixed

MINI = preset("mini")


def with_elastic(config: BackboneConfig, elastic: ElasticConfig) -> BackboneConfig:
    return BackboneConfig.model_validate(config.model_dump() | {"elastic": elastic.model_dump()})


def test_every_preset_can_be_trained():
    for config in PRESETS.values():
        config.check_trainable()
        BackboneConfig.model_validate(config.model_dump())


def test_depth_draws_below_the_layers_that_always_run_are_refused(tmp_path):
    config = with_elastic(NANO, ElasticConfig(depth_range=(0.3, 0.7)))
    with pytest.raises(ValueError, match=r"raise depth_range to 0\.5"):
        Trainer(config, TrainingConfig(), tmp_path, {})
    with_elastic(NANO, ElasticConfig(depth_range=(0.3, 0.7), depth_probability=0)).check_trainable()


@pytest.mark.parametrize(
    "wrong",
    [
        {"width_range": (0.5, 0.3)},
        {"width_range": (0, 0.5)},
        {"depth_range": (0.3, 1.1)},
        {"top_k_range": (0, 1)},
    ],
)
def test_ranges_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ElasticConfig(**wrong)


def test_a_reduced_k_lies_below_the_models_own():
    with pytest.raises(ValueError, match="top_k_range"):
        with_elastic(NANO, ElasticConfig(top_k_range=(1, NANO.top_k)))
    only_one = BackboneConfig.model_validate(NANO.model_dump() | {"top_k": 1})
    assert draw_top_k(only_one, 50, np.random.default_rng(0)) is None


def test_the_default_draws_depth_by_row_width_by_sample_and_k_by_layer():
    generator = np.random.default_rng(1)
    draws = StepDraws(MINI, generator)
    assert len({draws.layers() for _ in range(60)}) > 5
    sample = torch.arange(300)
    routing = draws.routing(sample, 300, torch.ones(300, dtype=torch.bool))
    assert len(torch.unique(routing.expert_mask.flatten(1), dim=0)) > 30
    assert (routing.expert_mask[:, 0] != routing.expert_mask[:, 1]).any()
    assert (routing.top_k != routing.top_k[:, :1]).any()


def test_the_articles_draws_are_one_for_the_batch():
    config = with_elastic(MINI, ElasticConfig.article())
    depths, widths, ks = set(), [], []
    for step in range(400):
        draws = StepDraws(config, np.random.default_rng(step))
        layers = draws.layers()
        assert all(draws.layers() == layers for _ in range(3))
        depths.add(layers)
        first, second = (draws.routing(torch.arange(4), 4, torch.ones(4, dtype=torch.bool)) for _ in range(2))
        for one, other, shape in (
            (first.expert_mask, second.expert_mask, (4, MINI.layers, MINI.experts)),
            (first.top_k, second.top_k, (4, MINI.layers)),
        ):
            assert (one is None) == (other is None)
            if one is not None:
                assert one.shape == shape and torch.equal(one, other) and (one == one[:1]).all()
        widths.append(first.expert_mask)
        ks.append(first.top_k)
    full = tuple(range(MINI.layers))
    assert full in depths and all(layers == full or 2 <= len(layers) <= 6 for layers in depths)
    for drawn in (widths, ks):
        assert 0.13 < np.mean([value is not None for value in drawn]) < 0.27
    assert {int(value.max()) for value in ks if value is not None} == {1}
    kept = {int(value[0, 0].sum()) for value in widths if value is not None}
    assert min(kept) >= MINI.top_k and max(kept) == MINI.experts // 2


def test_the_reports_draws_are_by_instance_and_keep_half_the_experts():
    config = with_elastic(MINI, ElasticConfig.report(MINI.layers, MINI.audio_layers))
    config.check_trainable()
    generator = np.random.default_rng(2)
    depths = {len(draw_layers(config, generator)) for _ in range(3000)}
    assert depths == set(range(1 + MINI.audio_layers, MINI.layers + 1))
    mask = draw_width(config, 500, generator)
    assert set(mask.sum(-1).unique().tolist()) == {MINI.experts // 2, MINI.experts}
    top_k = draw_top_k(config, 500, generator)
    assert (top_k == top_k[:, :1]).all()
    assert set(top_k.unique().tolist()) == set(range(1, MINI.top_k + 1))


def test_width_draws_leave_each_isolated_pool_its_share():
    config = BackboneConfig.model_validate(
        MINI.model_dump() | {"experts": 32, "router": {"pool": "isolated", "isolated_experts": (14, 6, 8, 4)}}
    )
    mask = draw_width(config, 400, np.random.default_rng(3))
    for own, size in zip(mask.split(config.expert_shares, -1), config.expert_shares):
        kept = own.sum(-1)
        assert kept.min() == max(config.top_k, round(0.3 * size))
        reduced = (mask.sum(-1) < 32).all(-1)
        assert kept[reduced].max() == max(config.top_k, round(0.5 * size))
        assert (kept[~reduced] == size).all()


def test_skipped_layers_and_inactive_experts_cost_nothing(monkeypatch, tmp_path):
    """Counts the blocks that run and the rows that reach experts in whole training steps."""
    blocks, rows = [], []
    forward, inner = Block.forward, experts_module.sparse_swiglu

    def counting_block(self, x, turn, attend, routing, layer, *others):
        blocks.append((x.shape[0], layer))
        return forward(self, x, turn, attend, routing, layer, *others)

    def counting_experts(x, gate_up, down, expert, weight, valid=None):
        rows.append((len(x), expert.shape[1], expert.numel() if valid is None else int(valid.sum())))
        return inner(x, gate_up, down, expert, weight, valid)

    monkeypatch.setattr(Block, "forward", counting_block)
    monkeypatch.setattr(experts_module, "sparse_swiglu", counting_experts)
    elastic = ElasticConfig(
        depth_probability=1.0, depth_range=(0.5, 0.5), top_k_probability=1.0, width_probability=0
    )
    training = TrainingConfig(steps=3, rows=4, row_length=96, threads=1, microbatch_rows=1)
    samples = ((position, mixed(np.random.default_rng(position), position)) for position in range(10**6))
    list(Trainer(with_elastic(NANO, elastic), training, tmp_path, {}).run(samples))
    assert sum(count for count, _ in blocks) == 3 * 4 * 2  # two of four layers a row
    assert {layer for _, layer in blocks} == {0, NANO.layers - 1}
    # k is 1 of 2 for every sample.
    assert all(slots == 2 and used == tokens for tokens, slots, used in rows)


def test_balance_ignores_experts_that_the_draw_masked_out(tmp_path):
    """With every sample at reduced width nobody counts, so no bias moves; at full width it does."""
    training = TrainingConfig(steps=2, rows=2, row_length=96, threads=1)
    for probability in (1.0, 0.0):
        elastic = ElasticConfig(depth_probability=0, width_probability=probability, top_k_probability=0)
        samples = ((position, mixed(np.random.default_rng(position), position)) for position in range(10**6))
        trainer = Trainer(with_elastic(NANO, elastic), training, tmp_path / str(probability), {})
        list(trainer.run(samples))
        moved = [trainer.model.feed_forward(layer).selection_bias.any() for layer in range(NANO.layers)]
        assert all(moved) if probability == 0 else not any(moved)


def test_a_steps_routing_tells_the_kind_of_each_position(tmp_path):
    config = BackboneConfig.model_validate(
        NANO.model_dump() | {"router": {"pool": "isolated", "round_robin_steps": 4}}
    )
    batch = pack([[lay_out(mixed(np.random.default_rng(4), 0), config, VOCABULARY)]], 64, config)
    draws = StepDraws(config, np.random.default_rng(5), step=6)
    counted = torch.ones(64, dtype=torch.bool)
    routing = draws.routing(batch.sample.flatten(), batch.samples, counted, batch.group.flatten())
    assert torch.equal(routing.group, batch.group.flatten())
    assert routing.turn == 6 and routing.round_robin == 0.5
