"""Distillation of the full model into rows of reduced depth."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ernie5.backbone.config import ElasticConfig
from ernie5.backbone.elastic.calibration import calibration_batches
from ernie5.backbone.objectives.distillation import text_distillation
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from tests.backbone.samples import NANO, mixed
from tests.backbone.test_inference import loud
from tests.backbone.test_training import stream, weights


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(4)
    (batch,) = calibration_batches([mixed(rng, kind) for kind in range(5)], NANO, row_length=128)
    return batch


def test_the_term_is_the_divergence_from_the_full_model_minus_the_cross_entropy(batch):
    model = loud(NANO)
    outputs = model(batch, layers=(0, 3))
    probability = model(batch).text.softmax(-1).detach()
    student = outputs.text.log_softmax(-1)
    divergence = (probability * (probability.log() - student)).sum(-1)
    entropy = F.cross_entropy(outputs.text, batch.text_target, reduction="none")
    wanted = ((divergence - entropy) * batch.text_weight).sum()
    assert divergence.min().item() >= -1e-5 and divergence.max().item() > 0.01
    torch.testing.assert_close(text_distillation(model, batch, outputs), wanted)


def test_the_full_model_has_nothing_to_learn_from_itself(batch):
    model = loud(NANO)
    outputs = model(batch)
    entropy = F.cross_entropy(outputs.text, batch.text_target, reduction="none")
    wanted = -(entropy * batch.text_weight).sum()
    torch.testing.assert_close(text_distillation(model, batch, outputs), wanted)


def test_no_gradient_reaches_the_teacher(batch):
    model = loud(NANO)
    frozen = copy.deepcopy(model).requires_grad_(False)
    own = text_distillation(model, batch, model(batch, layers=(0, 3)))
    apart = text_distillation(frozen, batch, model(batch, layers=(0, 3)))
    parameters = [value for name, value in model.named_parameters() if name.startswith("layers.")]
    for one, other in zip(
        torch.autograd.grad(own, parameters, allow_unused=True),
        torch.autograd.grad(apart, parameters, allow_unused=True),
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other)


def test_the_trainer_distils_rows_of_reduced_depth_alone(tmp_path):
    training = TrainingConfig(steps=2, rows=2, row_length=96, threads=1, warmup=1, checkpoint_every=99)

    def trained(elastic: ElasticConfig, distillation: float) -> tuple[dict[str, torch.Tensor], float]:
        folder = tmp_path / f"{elastic.depth_probability}-{distillation}"
        network = NANO.model_copy(update={"elastic": elastic})
        options = training.model_copy(update={"distillation": distillation})
        trainer = Trainer(network, options, folder, {})
        first, _ = list(trainer.run(stream()))
        return weights(trainer), first.losses["text"]

    never, always = (
        ElasticConfig.off(),
        ElasticConfig.off().model_copy(update={"depth_probability": 1.0, "depth_range": (0.5, 0.75)}),
    )
    plain, distilled = trained(never, 0.0)[0], trained(never, 0.5)[0]
    assert all(torch.equal(plain[name], distilled[name]) for name in plain)
    (plain, nats), (distilled, same) = trained(always, 0.0), trained(always, 0.5)
    assert any(not torch.equal(plain[name], distilled[name]) for name in plain)
    # What is reported stays the cross-entropy.
    assert nats == pytest.approx(same, rel=1e-6)
