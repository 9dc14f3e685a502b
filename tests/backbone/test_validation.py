"""Validation curves of sub-models: what they measure, what resuming forgets, what TensorBoard reads."""

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ernie5.backbone.elastic.calibration import calibration_batches, measure_loss
from ernie5.backbone.elastic.subnetwork import choose_subnetwork
from ernie5.backbone.training.validation import NAMED, Shares, SubModelValidation, read_validation
from tests.backbone.samples import NANO, mixed
from tests.backbone.test_inference import loud


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(3)
    return calibration_batches([mixed(rng, kind) for kind in range(10)], NANO, row_length=128)


def test_each_curve_is_the_loss_of_the_sub_model_it_is_named_after(tmp_path, batches):
    model = loud(NANO)
    validation = SubModelValidation(batches, tmp_path, every=2, tensorboard=False)
    assert validation.after(model, 1) == {} and read_validation(validation.table) == []
    losses = validation.after(model, 2)
    assert list(losses) == list(NAMED) == ["full", "d60", "w50", "k1", "d60-w50-k1"]
    assert losses["full"] == measure_loss(model, batches)
    assert losses["d60"] == measure_loss(model, batches, choose_subnetwork(model, depth=0.6))
    assert losses["d60-w50-k1"] == measure_loss(model, batches, choose_subnetwork(model, 0.6, 0.5, 1))
    assert len({loss.total for loss in losses.values()}) == len(losses)
    rows = read_validation(validation.table)
    assert [row["model"] for row in rows] == list(NAMED)
    assert {row["step"] for row in rows} == {"2"}
    for row in rows:
        assert float(row["loss"]) == pytest.approx(losses[row["model"]].total, abs=1e-6)
        assert float(row["audio"]) == pytest.approx(losses[row["model"]].nats["audio"], abs=1e-6)


def test_resuming_forgets_steps_that_will_be_taken_again(tmp_path, batches):
    model = loud(NANO)
    named = {"full": Shares(), "k1": Shares(top_k=1)}
    validation = SubModelValidation(batches, tmp_path, every=1, named=named, tensorboard=False)
    for step in (1, 2, 3):
        validation.measure(model, step)
    with validation.table.open("a") as file:
        file.write("4,full")  # the process died here
    again = SubModelValidation(batches, tmp_path, every=1, named=named, tensorboard=False)
    again.resume(2)
    again.measure(model, 3)
    assert [(row["step"], row["model"]) for row in read_validation(again.table)] == [
        (step, name) for step in ("1", "2", "3") for name in named
    ]


def test_tensorboard_reads_the_curves(tmp_path, batches):
    validation = SubModelValidation(batches, tmp_path, every=5, named={"w50": Shares(width=0.5)})
    losses = [validation.measure(loud(NANO), step)["w50"].total for step in (5, 10)]
    validation.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("validation/w50")] == [5, 10]
    assert [event.value for event in events.Scalars("validation/w50")] == pytest.approx(losses)


def test_a_period_below_one_is_refused(tmp_path, batches):
    with pytest.raises(ValueError, match="every 0 steps"):
        SubModelValidation(batches, tmp_path, every=0)
