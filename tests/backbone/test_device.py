"""Training and answering on another device: nothing is left behind on the host, and little is waited for."""

import sys

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ernie5.backbone.config import AllocationConfig, RouterConfig
from ernie5.backbone.elastic.calibration import measure_loss
from ernie5.backbone.elastic.subnetwork import choose_subnetwork
from ernie5.backbone.execution import CPU, Execution, choose_device, numbers, on_host
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model import placement
from ernie5.backbone.model.placement import place
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import pack
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.generation import GenerationParams, Request
from tests.backbone.pretend_device import DEVICE, PretendDevice
from tests.backbone.samples import NANO, VOCABULARY, mixed, picture, sequence, text
from tests.backbone.test_inference import HASHES, loud, run

TRAINING = TrainingConfig(
    steps=2, rows=3, row_length=96, warmup=1, threads=1, microbatch_rows=2, distillation=0.2
)
# What a dynamic allocation, an isolated pool and the auxiliary losses add.
BY_NEED = NANO.model_copy(
    update={
        "router": RouterConfig(
            auxiliary_weight=0.01,
            z_weight=1e-3,
            round_robin_steps=1,
            allocation=AllocationConfig(policy="threshold", budget=1.5),
        )
    }
)
ISOLATED = NANO.model_copy(update={"router": RouterConfig(pool="isolated")})


def stream(position: int = 0):
    while True:
        yield position, mixed(np.random.default_rng(position), position)
        position += 1


def requests() -> list[Request]:
    rng = np.random.default_rng(0)

    def greedy(tokens, **params):
        return GenerationParams(max_tokens=tokens, temperature=0.0, seed=1, **params)

    return [
        Request("text", sequence(text(rng, "context")), greedy(6)),
        Request("drawn", sequence(text(rng, "context")), GenerationParams(max_tokens=6, seed=2, top_p=0.9)),
        Request("image", sequence(text(rng, "context", 6)), greedy(80, modalities=("image",), width=0.5)),
        Request(
            "speech",
            sequence(picture(rng, "context"), text(rng, "context")),
            greedy(5, modalities=("speech",), experts_per_token=1),
        ),
    ]


@pytest.fixture
def same_kernels(monkeypatch):
    """The portable kernels on both sides, and one thread, so that sums run in one order."""
    monkeypatch.setenv("ERNIE_MULTI_ATTENTION", "panels")
    monkeypatch.setenv("ERNIE_MULTI_EXPERTS", "grouped")
    with sdpa_kernel(SDPBackend.MATH):
        yield


def trained(config, folder, execution=CPU):
    trainer = Trainer(config, TRAINING, folder, {}, execution=execution)
    reports = list(trainer.run(stream()))
    return trainer, reports


def pretended(monkeypatch):
    monkeypatch.setattr(placement, "choose_device", lambda name: DEVICE)
    optimizer = sys.modules["torch.optim.optimizer"]  # torch.optim deletes its name
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type])


def test_the_pretended_device_refuses_mixing_and_counts_waits():
    with PretendDevice() as device:
        there = torch.ones(2, device=DEVICE)
        with pytest.raises(RuntimeError, match="mixes devices"):
            there + torch.ones(2)
        assert not device.waits
        assert (there + 1).tolist() == [2.0, 2.0] and bool((there > 0).all())
    assert sum(device.waits.values()) == 2


@pytest.mark.parametrize("config", [NANO, BY_NEED, ISOLATED], ids=["fixed", "by need", "isolated"])
def test_training_mixes_no_devices_and_equals_the_cpu(config, same_kernels, monkeypatch, tmp_path):
    plain, expected = trained(config, tmp_path / "cpu")
    pretended(monkeypatch)
    with PretendDevice() as device:
        there, reports = trained(config, tmp_path / "there", Execution(device="auto"))
    assert there.device == DEVICE and there.model.device == DEVICE
    assert [report.loss for report in reports] == [report.loss for report in expected]
    assert [report.losses for report in reports] == [report.losses for report in expected]
    assert [report.load_imbalance for report in reports] == [report.load_imbalance for report in expected]
    for name, value in plain.model.state_dict().items():
        assert torch.equal(there.model.state_dict()[name].cpu(), value), name
    if config is NANO:
        # The loop itself waits for a step's figures and for its loads, and for nothing else.
        own = {
            place: count
            for place, count in device.waits_in("/backbone/").items()
            if "/checkpoint.py" not in place
        }
        assert all("/execution.py" in place for place in own), own
        assert sum(own.values()) == TRAINING.steps * 4


def test_checkpoints_move_between_devices(same_kernels, monkeypatch, tmp_path):
    whole, _ = trained(NANO, tmp_path / "whole")
    with monkeypatch.context() as patch, PretendDevice():
        pretended(patch)
        there = Trainer(NANO, TRAINING, tmp_path / "moved", {}, execution=Execution())
        next(iter(there.run(stream())))
        there.checkpoint()
    here = Trainer(NANO, TRAINING, tmp_path / "moved", {})
    assert here.resume() and here.step == 1
    list(here.run(stream(here.position)))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(here.model.state_dict()[name], value), name


def test_answers_mix_no_devices_and_equal_the_cpu(same_kernels, monkeypatch):
    expected = run(InferenceEngine(loud(), HASHES, capacity=3, max_length=200), *requests())
    pretended(monkeypatch)
    with PretendDevice() as device:
        model = loud()
        place(model, Execution())
        got = run(InferenceEngine(model, HASHES, capacity=3, max_length=200), *requests())
    assert repr(got) == repr(expected)
    # Everything that decisions read comes to the host at one place.
    assert not device.waits_in("/backbone/inference/")


def test_sub_models_are_measured_on_the_device(same_kernels, monkeypatch):
    rng = np.random.default_rng(1)
    batch = pack([[lay_out(mixed(rng, kind), NANO, VOCABULARY) for kind in range(5)]], 160, NANO)
    model = loud()
    part = choose_subnetwork(model, 0.5, 0.5, 1)
    expected = measure_loss(model, [batch], part)
    pretended(monkeypatch)
    with PretendDevice():
        place(model, Execution())
        assert measure_loss(model, [batch], part) == expected


def test_rows_on_another_device_keep_their_plan_and_counts():
    rng = np.random.default_rng(2)
    batch = pack([[lay_out(mixed(rng, kind), NANO, VOCABULARY) for kind in range(5)]], 160, NANO)
    assert batch.to(torch.device("cpu")) is batch
    with PretendDevice() as device, torch.inference_mode():
        there = batch.to(DEVICE, non_blocking=True)
    assert not device.waits
    assert there.plan().intervals.device == DEVICE
    assert torch.equal(there.plan().intervals.cpu(), batch.plan().intervals)
    assert torch.equal(there.bits_target.cpu(), batch.bits_target.long())
    assert there.lengths == batch.lengths


def test_impossible_devices_are_refused(monkeypatch):
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidInputError, match=r"unknown device 'tpu'.*cuda:0"):
        choose_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(InvalidInputError, match=r"finds 0 CUDA devices.*take cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(InvalidInputError, match="cuda:0 to cuda:1"):
        choose_device("cuda:2")


def test_placing_on_the_cpu_leaves_precision_alone():
    before = (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision())
    assert place(Backbone(NANO), Execution(device="cpu", tf32=True)) == torch.device("cpu")
    assert (torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()) == before


def test_figures_come_to_the_host_as_they_are():
    values = [torch.tensor(0.1), torch.tensor(1e-30), torch.tensor(3.0)]
    assert numbers(values) == [float(value) for value in values] and numbers([]) == []
    assert all(copy is value for copy, value in zip(on_host(*values), values))
