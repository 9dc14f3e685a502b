"""Elasticity over the course of training: how often draws are reduced at each step."""

import pytest

from ernie5.backbone.config import ElasticConfig
from ernie5.backbone.elastic.ramp import elastic_share, scaled
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from tests.backbone.samples import NANO
from tests.backbone.test_training import stream


def test_shares_rise_stay_and_fall():
    shares = [elastic_share(step, 10, ramp=0.4, calm=0.2) for step in range(10)]
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.5])
    assert [elastic_share(step, 10) for step in range(10)] == [1.0] * 10
    with pytest.raises(ValueError, match="at most 1 together"):
        elastic_share(0, 10, ramp=0.6, calm=0.5)


def test_scaling_touches_the_probabilities_alone():
    half = scaled(ElasticConfig(), 0.5)
    assert (half.depth_probability, half.width_probability, half.top_k_probability) == (0.125, 0.1, 0.1)
    assert (
        half.model_copy(
            update={"depth_probability": 0.25, "width_probability": 0.2, "top_k_probability": 0.2}
        )
        == ElasticConfig()
    )


def test_a_ramp_may_leave_axes_alone():
    later = scaled(ElasticConfig(), 0.5, ("depth",))
    assert later == ElasticConfig(depth_probability=0.125)


@pytest.mark.parametrize(("option", "reduced"), [("elastic_ramp", "late"), ("elastic_calm", "early")])
def test_the_trainer_draws_by_the_schedule(tmp_path, option, reduced):
    always = NANO.model_copy(update={"elastic": NANO.elastic.model_copy(update={"depth_probability": 1.0})})
    training = TrainingConfig(
        steps=12, rows=6, row_length=48, threads=1, warmup=2, checkpoint_every=99, **{option: 1.0}
    )
    trainer = Trainer(always, training, tmp_path, {})
    full = [report.rows_by_depth.get(NANO.layers, 0) for report in trainer.run(stream())]
    early, late = sum(full[:6]), sum(full[6:])
    assert early > late if reduced == "late" else early < late
    # The model says what it was asked to be, not what the last step drew from.
    assert trainer.model.config.elastic == always.elastic
