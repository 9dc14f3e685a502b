"""The compiled parts: equal to the plain ones, whole graphs, compiled once whatever is packed."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from ernie5.backbone.execution import Execution
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.placement import place
from ernie5.backbone.model.regions import Regions
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.next_group import Losses, LossWeights, loss_sums, weighted_loss
from ernie5.backbone.rows import RowBatch, pack
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from tests.backbone.samples import NANO, VOCABULARY, mixed, picture, sequence, sound, text
from tests.backbone.test_inference import HASHES, loud, run

# Everything in front of the code generator: the same graphs, without a minute of C++.
GRAPHS = "aot_eager"


def batch_of(seed: int, rows: int, length: int) -> RowBatch:
    """Rows of all kinds of samples, as many as fit."""
    rng = np.random.default_rng(seed)
    packed = []
    for row in range(rows):
        samples, used = [], 0
        for kind in range(row, row + 10):
            layout = lay_out(mixed(rng, kind), NANO, VOCABULARY)
            if used + len(layout) <= length:
                samples.append(layout)
                used += len(layout)
        packed.append(samples)
    return pack(packed, length, NANO)


def gradients(model: Backbone, losses: Losses, batch: RowBatch, layers=None) -> tuple[torch.Tensor, list]:
    sums = loss_sums(model(batch, layers=layers), batch, losses)
    loss = weighted_loss(sums, sums.count, NANO, LossWeights())
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def expect_equal(plain: Backbone, fast: Backbone, losses: Losses, batch: RowBatch, layers=None) -> None:
    want, want_slopes = gradients(plain, Losses(), batch, layers)
    got, slopes = gradients(fast, losses, batch, layers)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for (name, _), slope, wanted in zip(plain.named_parameters(), slopes, want_slopes):
        assert (slope is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(slope, wanted, rtol=1e-4, atol=1e-5, msg=name)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_model(backend: str) -> tuple[Backbone, Losses]:
    model = Backbone(NANO, seed=3)
    model.regions = Regions.compiled(backend)
    return model, Losses.compiled(backend)


def test_training_compiles_five_graphs_once_and_equals_plain():
    plain, (fast, losses) = Backbone(NANO, seed=3), compiled_model(GRAPHS)
    expect_equal(plain, fast, losses, batch_of(0, 2, 96))
    first = graphs()
    assert first == 5  # two in the layers, the audio heads, two losses
    # Other numbers of rows, lengths and layers, and modalities that don't occur.
    expect_equal(plain, fast, losses, batch_of(1, 1, 128), layers=(0, 2, 3))
    expect_equal(plain, fast, losses, batch_of(2, 3, 64), layers=(0, 3))
    rng = np.random.default_rng(4)
    expect_equal(plain, fast, losses, pack([[lay_out(mixed(rng, 4), NANO, VOCABULARY)]], 32, NANO))
    assert graphs() == first
    assert not counters["graph_break"]


def test_models_of_other_widths_do_not_share_entries():
    for width in (40, 48, 56):
        config = NANO.model_copy(update={"width": width})
        model = Backbone(config)
        model.regions = Regions.compiled("eager")
        rng = np.random.default_rng(0)
        model(pack([[lay_out(mixed(rng, 4), config, VOCABULARY)]], 32, config))
    assert graphs() == 2 * 3


def test_answers_of_a_compiled_model_are_those_of_the_plain_one():
    from ernie5.protocol.generation import GenerationParams, Request

    rng = np.random.default_rng(0)
    params = {"temperature": 0.0, "seed": 1}
    asked = [
        Request("a", sequence(text(rng, "context")), GenerationParams(max_tokens=5, **params)),
        Request(
            "b",
            sequence(picture(rng, "context"), sound(rng, "context"), text(rng, "context")),
            GenerationParams(max_tokens=80, modalities=("image",), **params),
        ),
        Request(
            "c",
            sequence(text(rng, "context", 6)),
            GenerationParams(max_tokens=6, modalities=("speech",), **params),
        ),
    ]
    want = run(InferenceEngine(loud(), HASHES, capacity=3, max_length=200), *asked)
    fast = loud()
    fast.regions = Regions.compiled(GRAPHS)
    engine = InferenceEngine(fast, HASHES, capacity=3, max_length=200)
    assert repr(run(engine, *asked)) == repr(want)
    first = graphs()
    assert first <= 6  # the layers' two and the heads' one, for one row and for many
    run(engine, *(Request(f"again {item.id}", item.sequence, item.params) for item in reversed(asked)))
    assert graphs() == first
    assert not counters["graph_break"]


def test_placing_compiles_only_when_asked():
    model = Backbone(NANO)
    place(model, Execution(device="cpu"))
    assert model.regions == Regions()
    place(model, Execution(device="cpu", compile=True))
    assert model.regions.real_rotation


@pytest.mark.slow
@pytest.mark.timeout(1200)  # most of it in the code generator, on however little of a core
def test_generated_code_equals_plain():
    plain, (fast, losses) = Backbone(NANO, seed=3), compiled_model("inductor")
    expect_equal(plain, fast, losses, batch_of(0, 2, 96))
    expect_equal(plain, fast, losses, batch_of(1, 1, 128), layers=(0, 3))
    assert graphs() == 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_compiled_training_run_has_the_losses_of_the_plain_one(tmp_path):
    training = TrainingConfig(steps=4, rows=2, row_length=96, warmup=2, threads=1, checkpoint_every=4)
    losses = []
    for compiled in (False, True):
        stream = ((number, mixed(np.random.default_rng(number), number)) for number in range(1000))
        out = tmp_path / str(compiled)
        trainer = Trainer(NANO, training, out, {}, execution=Execution(device="cpu", compile=compiled))
        losses.append([report.loss for report in trainer.run(stream)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] != losses[0]  # other code did it
