"""Training and answering on a GPU against the CPU."""

import numpy as np
import pytest
import torch

from ernie5.backbone.execution import CPU, Execution, set_tf32
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.placement import place
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.next_group import LossWeights, loss_sums, weighted_loss
from ernie5.backbone.rows import pack
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from tests.backbone.samples import NANO, VOCABULARY, mixed
from tests.backbone.test_device import requests, stream
from tests.backbone.test_inference import HASHES, loud, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EXACT = Execution(device="cuda", tf32=False)


@pytest.fixture(autouse=True)
def precision():
    yield
    set_tf32(False)


def test_gradients_equal_the_cpus():
    rng = np.random.default_rng(0)
    rows = [[lay_out(mixed(rng, kind), NANO, VOCABULARY) for kind in range(row, row + 4)] for row in range(2)]
    batch = pack(rows, 160, NANO)
    found = []
    for execution in (CPU, EXACT):
        model = Backbone(NANO, seed=2)
        device = place(model, execution)
        here = batch.to(device, non_blocking=True)
        sums = loss_sums(model(here), here)
        weighted_loss(sums, sums.count, NANO, LossWeights()).backward()
        found.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})
    cpu, gpu = found
    assert cpu.keys() == gpu.keys()
    for name, slope in cpu.items():
        torch.testing.assert_close(gpu[name], slope, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("tf32", [False, True])
def test_training_follows_the_cpu(dtype, tolerance, compile, tf32, tmp_path):
    training = TrainingConfig(
        steps=3, rows=3, row_length=96, warmup=1, threads=1, learning_rate=1e-3, compute_dtype=dtype
    )
    tolerance = max(tolerance, 5e-3) if tf32 else tolerance
    losses = []
    for execution in (CPU, Execution(device="cuda", tf32=tf32, compile=compile)):
        trainer = Trainer(NANO, training, tmp_path / execution.device, {}, execution=execution)
        losses.append([report.loss for report in trainer.run(stream())])
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerance)


def test_checkpoints_move_both_ways(tmp_path):
    training = TrainingConfig(steps=4, rows=2, row_length=96, warmup=1, threads=1, checkpoint_every=1)
    for number, execution in enumerate((CPU, EXACT, CPU, EXACT)):
        trainer = Trainer(NANO, training, tmp_path, {}, execution=execution)
        assert trainer.resume() == (number > 0) and trainer.step == number
        assert np.isfinite(next(iter(trainer.run(stream(trainer.position)))).loss)
        trainer.checkpoint()


@pytest.mark.parametrize("compile", [False, True])
def test_answers_are_those_of_the_cpu(compile):
    """Greedy ones, and draws of the same numbers."""
    want = run(InferenceEngine(loud(), HASHES, capacity=3, max_length=200), *requests())
    model = loud()
    place(model, EXACT.model_copy(update={"compile": compile}))
    assert repr(run(InferenceEngine(model, HASHES, capacity=3, max_length=200), *requests())) == repr(want)
