"""Experts read from the file when wanted: equal results, a bound that holds, figures that add up."""

import numpy as np
import pytest
import torch

from ernie5.backbone.elastic.calibration import calibration_batches
from ernie5.backbone.elastic.extraction import extract
from ernie5.backbone.elastic.resident import ResidentMeter, ResidentRequest
from ernie5.backbone.elastic.subnetwork import choose_subnetwork
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.inference.offload import ExpertStore, load_offloaded
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.generation import GenerationParams, Request
from tests.backbone.samples import NANO, mixed, sequence, text
from tests.backbone.test_inference import HASHES, loud, run

CONFIG = NANO.model_copy(update={"top_k": 3, "layers": 5})
EXPERT = 3 * 64 * 32 * 4  # bytes of one of its experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, loud(CONFIG), HASHES)
    return path


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(1)
    return calibration_batches([mixed(rng, kind) for kind in range(10)], CONFIG, row_length=128)


@pytest.mark.parametrize("backend", ["auto", "grouped"])
@pytest.mark.parametrize("slots", [1, 3, 11, 100])
@pytest.mark.parametrize("choice", [(None, None, None), (0.6, 0.5, 1), (None, 0.5, 2)])
def test_results_equal_the_resident_models(folder, batches, slots, choice, backend, monkeypatch):
    monkeypatch.setenv("ERNIE_MULTI_EXPERTS", backend)
    resident, _ = load_model(folder)
    offloaded, hashes = load_offloaded(folder, slots * EXPERT)
    assert hashes == HASHES
    subnetwork = choose_subnetwork(resident, *choice)
    for batch in batches * 2:
        with torch.inference_mode():
            wanted = resident(batch, layers=subnetwork.layers, routing=subnetwork.routing())
            got = offloaded(batch, layers=subnetwork.layers, routing=subnetwork.routing())
        assert torch.equal(wanted.hidden, got.hidden)
        assert torch.equal(wanted.text, got.text)
    stats = offloaded.store.stats
    assert stats.peak_bytes <= slots * EXPERT
    assert stats.bytes_read - stats.bytes_dropped == stats.resident_bytes
    assert stats.bytes_read == (stats.misses + stats.guessed) * EXPERT
    assert stats.used <= min(stats.hits, stats.guessed)


def test_answers_equal_the_resident_models(folder):
    def answers(model):
        rng = np.random.default_rng(3)
        params = [
            GenerationParams(seed=5, max_tokens=30, modalities=("text", "image", "speech"), max_frames=4),
            GenerationParams(seed=6, max_tokens=30, depth=0.6, width=0.5, experts_per_token=1),
        ]
        requests = [
            Request(str(number), sequence(text(rng, "context")), choice)
            for number, choice in enumerate(params)
        ]
        return run(InferenceEngine(model, HASHES, capacity=2, max_length=200), *requests)

    offloaded, _ = load_offloaded(folder, 6 * EXPERT)
    assert repr(answers(offloaded)) == repr(answers(load_model(folder)[0]))
    stats = offloaded.store.stats
    assert 0 < stats.hit_rate < 1
    assert stats.as_json()["hit_rate"] == stats.hits / (stats.hits + stats.misses)
    assert stats.used > 0, "guesses of the next layer's router are of use"


def test_what_fits_is_read_once(folder, batches):
    offloaded, _ = load_offloaded(folder, 5 * 8 * EXPERT)
    for _ in range(3):
        with torch.inference_mode():
            offloaded(batches[0])
    stats = offloaded.store.stats
    assert stats.bytes_dropped == 0
    assert stats.misses + stats.guessed <= 5 * 8
    misses = stats.misses
    with torch.inference_mode():
        offloaded(batches[0])
    assert stats.misses == misses


def test_least_recently_used_experts_go_first(folder):
    store = ExpertStore(folder / "model.safetensors", CONFIG, 3 * EXPERT)
    store.use(0, [0, 1, 2])
    store.use(0, [0])
    store.use(1, [4])  # drops 1 of layer 0
    assert store.stats.misses == 4 and store.stats.hits == 1
    store.use(0, [0, 2])
    assert store.stats.hits == 3
    store.use(0, [1])
    assert store.stats.misses == 5
    store.prefetch(2, [7, 6, 5, 4, 3])
    assert (store.stats.guessed, store.stats.resident_bytes) == (3, 3 * EXPERT)
    store.use(2, [7, 6])
    assert (store.stats.hits, store.stats.used) == (5, 2)


def test_weights_in_use_are_those_of_the_file(folder):
    model, _ = load_model(folder)
    store = ExpertStore(folder / "model.safetensors", CONFIG, 2 * EXPERT)
    gate_up, down = (store.tensors[f"layers.3.feed_forward.{leaf}"] for leaf in ("gate_up", "down"))
    for pair in ([0, 1], [2, 3], [1, 2], [6, 7]):
        store.prefetch(3, pair[:1])
        store.use(3, pair)
        assert torch.equal(gate_up[pair], model.feed_forward(3).gate_up[pair])
        assert torch.equal(down[pair], model.feed_forward(3).down[pair])


def test_a_memory_below_one_expert_and_other_files_are_refused(folder, tmp_path):
    with pytest.raises(InvalidInputError, match=f"holds no expert; one takes {EXPERT}"):
        load_offloaded(folder, EXPERT - 1)
    with pytest.raises(InvalidInputError, match="holds no model"):
        load_offloaded(tmp_path, EXPERT)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InvalidInputError, match=r"model\.safetensors is missing"):
        load_offloaded(tmp_path, EXPERT)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(InvalidInputError, match="can't be read"):
        load_offloaded(tmp_path, EXPERT)
    whole_file = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole_file[: len(whole_file) // 2])
    with pytest.raises(InvalidInputError):
        load_offloaded(tmp_path, EXPERT)


def test_inactive_experts_are_not_resident(tmp_path, monkeypatch):
    """Weights above the baseline of a process of their own: whole, half extracted, experts in the file."""
    # torch's products keep no scratch memory, which would count as well.
    monkeypatch.setenv("ERNIE_MULTI_EXPERTS", "grouped")
    config = NANO.model_copy(update={"width": 128, "experts": 32, "expert_width": 256, "layers": 5})
    parent = Backbone(config).eval()
    save_model(tmp_path / "whole", parent, {})
    save_model(tmp_path / "half", extract(parent, choose_subnetwork(parent, width=0.5)), {})
    expert = 3 * 128 * 256 * 4
    experts = 5 * 32 * expert
    total = sum(value.nbytes for value in parent.state_dict().values())
    requests = [
        ResidentRequest(str(tmp_path / "whole")),
        ResidentRequest(str(tmp_path / "half")),
        ResidentRequest(str(tmp_path / "whole"), expert_memory=20 * expert, tokens=64),
        ResidentRequest(str(tmp_path / "whole"), expert_memory=experts, width=0.5, tokens=64),
    ]
    with ResidentMeter() as meter:
        full, half, bounded, masked = (meter.measure(request) for request in requests)
    assert full["loaded"] >= 0.95 * total
    saved = 0.45 * experts
    assert half["loaded"] <= full["loaded"] - saved
    room = 8_000_000  # a few MB of activations come on top of weights
    assert bounded["loaded"] <= total - experts + room
    assert bounded["ran"] <= total - experts + 20 * expert + room
    assert masked["ran"] <= full["loaded"] - saved + room
