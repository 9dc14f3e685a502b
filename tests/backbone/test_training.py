"""The training loop: it learns, it resumes to the bit, its draws save work and its packing keeps order."""

import json

import numpy as np
import pytest
import torch

from ernie5.backbone.config import ElasticConfig, preset
from ernie5.backbone.elastic.draws import draw_layers, draw_routing
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.experts import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.next_group import LossWeights, loss_sums, weighted_loss
from ernie5.backbone.rows import pack
from ernie5.backbone.training.checkpoint import checkpoints, load_model
from ernie5.backbone.training.packing import pack_steps
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from ernie5.protocol.errors import InvalidInputError
from tests.backbone.samples import NANO, VOCABULARY, mixed, picture, sequence, sound, text

TRAINING = TrainingConfig(
    steps=6,
    rows=2,
    row_length=96,
    warmup=2,
    checkpoint_every=2,
    threads=1,
    learning_rate=3e-3,
    keep_checkpoints=9,
)


def stream(start: int = 0, hole: int = 7):
    """An endless ordered stream with a tombstone now and then; position alone decides each sample."""
    position = start
    while True:
        rng = np.random.default_rng(position)
        yield position, None if position % 11 == hole else mixed(rng, position)
        position += 1


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_stopping_anywhere_and_resuming_gives_the_same_weights(tmp_path):
    whole = Trainer(NANO, TRAINING, tmp_path / "whole", {"text": "t"})
    reports = list(whole.run(stream()))
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    assert reports[-1].skipped > 0
    for stop in (2, 4):
        folder = tmp_path / f"part{stop}"
        part = Trainer(NANO, TRAINING, folder, {"text": "t"})
        for report in part.run(stream()):
            if report.step == stop:
                break
        again = Trainer(NANO, TRAINING, folder, {"text": "t"})
        assert again.resume() and again.step == stop
        list(again.run(stream(again.position)))
        assert again.position == whole.position and again.skipped == whole.skipped
        for name, value in weights(whole).items():
            assert torch.equal(value, again.model.state_dict()[name]), name


def test_the_number_of_threads_changes_no_bit(tmp_path):
    results = []
    for threads in (1, 2):
        training = TRAINING.model_copy(update={"threads": threads, "microbatch_rows": 1, "steps": 3})
        trainer = Trainer(NANO, training, tmp_path / str(threads), {})
        list(trainer.run(stream()))
        results.append(weights(trainer))
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_a_checkpoint_is_a_model_folder_and_tells_what_it_covers(tmp_path):
    covered = []
    trainer = Trainer(NANO, TRAINING, tmp_path, {"text": "t"}, on_checkpoint=covered.append)
    list(trainer.run(stream()))
    assert covered[-1] == trainer.position and covered == sorted(covered)
    model, tokenizers = load_model(checkpoints(tmp_path)[-1])
    assert tokenizers == {"text": "t"}
    for name, value in weights(trainer).items():
        assert torch.equal(value, model.state_dict()[name])
    state = json.loads((checkpoints(tmp_path)[-1] / "state.json").read_text())
    assert state["position"] == trainer.position
    other = Trainer(NANO.model_copy(update={"experts": 4}), TRAINING, tmp_path, {})
    with pytest.raises(InvalidInputError, match="another configuration"):
        other.resume()


def test_damaged_model_folders_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="holds no model"):
        load_model(tmp_path)
    trainer = Trainer(NANO, TRAINING, tmp_path / "run", {})
    folder = trainer.checkpoint()
    weights_file = folder / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-100])
    with pytest.raises(InvalidInputError, match="can't be loaded"):
        load_model(folder)
    (folder / "config.json").write_text('{"format": 1, "backbone": {"layers": -1}, "tokenizers": {}}')
    with pytest.raises(InvalidInputError, match="not a model's configuration"):
        load_model(folder)


def test_a_damaged_checkpoint_is_refused_and_a_rewritten_one_leaves_nothing_behind(tmp_path):
    (tmp_path / ".step-00000009.1").mkdir()
    trainer = Trainer(NANO, TRAINING, tmp_path, {})
    for _ in range(2):
        folder = trainer.checkpoint()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    state = folder / "optimizer.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(InvalidInputError, match="can't be read"):
        Trainer(NANO, TRAINING, tmp_path, {}).resume()


def test_every_modality_is_learnt(tmp_path):
    rng = np.random.default_rng(0)
    fixed = [mixed(rng, kind) for kind in range(5)]
    config = NANO.model_copy(update={"elastic": ElasticConfig.off()})
    training = TRAINING.model_copy(update={"steps": 60, "checkpoint_every": 100, "learning_rate": 1e-2})
    trainer = Trainer(config, training, tmp_path, {})
    reports = list(trainer.run((position, fixed[position % 5]) for position in range(10**6)))
    for name in ("text", "vision", "audio"):
        assert reports[-1].losses[name] < 0.35 * reports[0].losses[name], name


def test_samples_that_do_not_fit_are_skipped_and_said(tmp_path):
    said = []
    trainer = Trainer(
        NANO, TRAINING, tmp_path, {}, on_skip=lambda position, reason: said.append((position, reason))
    )
    rng = np.random.default_rng(1)
    bad = {
        1: sequence(text(rng, "target", 200)),
        3: sequence(sound(rng, "context", levels=1), text(rng, "target")),
    }
    samples = ((p, bad.get(p) or mixed(rng, p)) for p in range(100))
    first = next(iter(trainer.run(samples)))
    assert first.skipped == 2
    assert [position for position, _ in said] == [1, 3]
    assert "row holds 96" in said[0][1] and "levels" in said[1][1]


def test_packing_keeps_order_and_loses_nothing():
    rng = np.random.default_rng(2)
    layouts = [(p, None if p % 9 == 4 else lay_out(mixed(rng, p), NANO, VOCABULARY)) for p in range(60)]
    seen, skipped, ends = [], 0, [0]
    for step in pack_steps(iter(layouts), rows=2, length=96):
        assert len(step.rows) <= 2 and all(sum(map(len, row)) <= 96 for row in step.rows)
        seen += [id(sample) for row in step.rows for sample in row]
        skipped += step.skipped
        ends.append(step.next_position)
    assert seen == [id(sample) for _, sample in layouts if sample is not None]
    assert skipped == sum(sample is None for _, sample in layouts)
    assert ends == sorted(ends) and ends[-1] == 60


def test_depth_draws_keep_the_first_and_the_audio_layers():
    config = preset("mini")
    generator = np.random.default_rng(3)
    draws = [draw_layers(config, generator) for _ in range(4000)]
    full = tuple(range(config.layers))
    assert abs(np.mean([draw != full for draw in draws]) - 0.25) < 0.03
    for draw in draws:
        assert set(config.kept_layers) <= set(draw) and list(draw) == sorted(set(draw))
        assert draw == full or 2 <= len(draw) <= 6


def test_routing_draws_follow_their_probabilities():
    config = preset("mini")
    mask, top_k = draw_routing(config, 4000, np.random.default_rng(4))
    active = mask.sum(-1)
    reduced = (active < config.experts).any(-1)
    assert abs(reduced.float().mean() - 0.2) < 0.03
    assert active[reduced].min() >= 4 and active[reduced].max() <= 8
    assert abs((top_k < config.top_k).float().mean() - 0.2) < 0.02
    assert top_k.min() == 1


def test_skipped_layers_get_no_gradient_and_masked_experts_no_token():
    rng = np.random.default_rng(5)
    batch = pack([[lay_out(mixed(rng, kind), NANO, VOCABULARY) for kind in range(3)]], 128, NANO)
    model = Backbone(NANO)
    mask = torch.zeros(batch.samples, NANO.layers, NANO.experts, dtype=torch.bool)
    mask[..., :3] = True
    top_k = torch.ones(batch.samples, NANO.layers, dtype=torch.long)
    routing = Routing(expert_mask=mask, top_k=top_k, sample=batch.sample.flatten(), keep_choices=True)
    outputs = model(batch, layers=(0, 3), routing=routing)
    sums = loss_sums(outputs, batch)
    weighted_loss(sums, sums.count, NANO, LossWeights()).backward()
    assert all(parameter.grad is None for parameter in model.layers[1].parameters())
    assert model.layers[0].feed_forward.router.grad is not None
    for choices in routing.choices.values():
        assert choices[:, 0].max() < 3 and (choices[:, 1] == -1).all()
    assert not model.layers[0].feed_forward.down.grad[3:].any()


def test_balance_moves_the_bias_towards_idle_experts():
    layer = Backbone(NANO).layers[0].feed_forward
    load = torch.tensor([10, 0, 0, 0, 0, 0, 0, 6])
    layer.balance(load)
    assert layer.selection_bias[0] < 0 < layer.selection_bias[1]


def test_a_sample_does_not_depend_on_its_neighbours_in_the_row():
    rng = np.random.default_rng(6)
    layouts = [lay_out(mixed(rng, kind), NANO, VOCABULARY) for kind in range(4)]
    layouts.append(lay_out(sequence(picture(rng, "context"), text(rng, "target")), NANO, VOCABULARY))
    model = Backbone(NANO).eval()
    with torch.no_grad():
        together = model(pack([layouts], 160, NANO)).hidden[0]
        offset = 0
        for layout in layouts:
            alone = model(pack([[layout]], len(layout), NANO)).hidden[0]
            torch.testing.assert_close(together[offset : offset + len(layout)], alone, rtol=0, atol=2e-5)
            offset += len(layout)
