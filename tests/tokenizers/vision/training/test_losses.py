"""Losses beside the reconstruction: off unless asked for, and each lowers what it measures."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.tokenizers.vision.model import VisionModelConfig
from ernie5.tokenizers.vision.training.data import TrainingData, canvases_of
from ernie5.tokenizers.vision.training.losses import (
    Discriminator,
    ExtraLosses,
    ExtraLossOptions,
    PerceptualLoss,
)
from ernie5.tokenizers.vision.training.teacher import (
    STAGE_CHANNELS,
    RandomNetwork,
    Teacher,
    load_folded,
    load_teacher,
)
from ernie5.tokenizers.vision.training.train import TrainingOptions, _Run

TRUNK = 16


@pytest.fixture(scope="module")
def teacher():
    """The teacher's network with random weights: the real ones are no part of the tests."""
    teacher = Teacher()
    random = torch.Generator().manual_seed(0)
    for parameter in teacher.parameters():
        if parameter.ndim == 4:
            nn.init.kaiming_normal_(parameter, generator=random)
    return teacher


@pytest.fixture
def batch():
    """Sharp pictures: random blocks of 8 pixels, with edges."""
    blocks = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return blocks.repeat_interleave(8, 2).repeat_interleave(8, 3)


def blurred(batch):
    return nn.functional.avg_pool2d(batch, 9, 1, padding=4, count_include_pad=False)


def test_all_are_off_by_default(batch):
    extra = ExtraLosses(ExtraLossOptions(), TRUNK)
    decoded = blurred(batch).requires_grad_()
    assert extra.terms(batch, decoded, torch.randn(4, TRUNK, 4, 4), 1.0) == {}
    assert extra.update(batch, decoded, 1.0) == {}
    assert extra.state() == {} and extra.card() == {}


@pytest.mark.parametrize("kind", ["teacher", "random"])
def test_the_perceptual_loss_lowers_itself_and_sees_blur(kind, teacher, batch):
    network = teacher if kind == "teacher" else RandomNetwork()
    loss = PerceptualLoss(network, 3)
    assert float(loss(batch, batch).max()) == pytest.approx(0, abs=1e-6)
    decoded = blurred(batch).requires_grad_()
    first = loss(batch, decoded)
    assert first.shape == (4,) and float(first.detach().min()) > 0
    optimizer = torch.optim.Adam([decoded], 0.03)
    for _ in range(20):
        optimizer.zero_grad()
        loss(batch, decoded).mean().backward()
        optimizer.step()
    assert float(loss(batch, decoded.detach()).mean()) < 0.6 * float(first.detach().mean())


def test_the_semantic_loss_teaches_the_trunk(teacher, batch):
    extra = ExtraLosses(ExtraLossOptions(semantic_weight=2.0, semantic_learning_rate=1e-2), TRUNK, teacher)
    torch.manual_seed(0)
    encoder = nn.Conv2d(3, TRUNK, 8, 8)
    optimizer = torch.optim.Adam(encoder.parameters(), 0.02)
    distances = []
    for _ in range(30):
        term = extra.terms(batch, batch, encoder(batch), 0.0)["semantic"]
        optimizer.zero_grad()
        term.backward()
        assert encoder.weight.grad is not None and float(encoder.weight.grad.abs().sum()) > 0
        optimizer.step()
        extra.update(batch, batch, 0.0)
        distances.append(float(term.detach()) / 2)
    assert distances[0] > 0.8 and distances[-1] < 0.8 * distances[0]


def test_the_discriminator_learns_and_the_decoder_follows(batch):
    options = ExtraLossOptions(
        adversarial_weight=1.0,
        adversarial_start=0.0,
        discriminator_width=8,
        discriminator_learning_rate=2e-3,
    )
    extra = ExtraLosses(options, TRUNK)
    decoded = blurred(batch).requires_grad_()
    losses = [extra.update(batch, decoded, 0.5)["discriminator"] for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    discriminator = extra.discriminator
    assert isinstance(discriminator, Discriminator)
    gap = float((discriminator(batch) - discriminator(decoded)).mean())
    assert gap > 0.5
    optimizer = torch.optim.Adam([decoded], 0.01)
    before = float(discriminator(decoded).mean())
    for _ in range(30):
        optimizer.zero_grad()
        extra.terms(batch, decoded, torch.zeros(4, TRUNK, 4, 4), 0.5)["adversarial"].backward()
        optimizer.step()
    assert float(discriminator(decoded).mean()) > before + 0.5 * gap


def test_the_adversarial_gradient_is_a_share_of_the_reconstructions(batch):
    options = ExtraLossOptions(adversarial_weight=0.1, adversarial_start=0.5, discriminator_width=8)
    extra = ExtraLosses(options, TRUNK)
    decoded = blurred(batch).requires_grad_()
    reconstruction = 20 * (decoded - batch).square().mean()
    trunk = torch.zeros(4, TRUNK, 4, 4)
    assert extra.terms(batch, decoded, trunk, 0.49, reconstruction=reconstruction) == {}
    assert extra.update(batch, decoded, 0.44) == {}  # it learns alone from 0.45 on
    assert extra.update(batch, decoded, 0.46)
    term = extra.terms(batch, decoded, trunk, 0.5, reconstruction=reconstruction)["adversarial"]
    wanted, found = (
        torch.autograd.grad(loss, decoded, retain_graph=True)[0].norm() for loss in (reconstruction, term)
    )
    assert float(found) == pytest.approx(0.1 * float(wanted), rel=1e-3)
    assert extra.discriminator is not None
    extra.discriminator.zero_grad(set_to_none=True)
    term.backward()
    assert all(parameter.grad is None for parameter in extra.discriminator.parameters())


def test_pictures_weigh_as_asked(batch):
    extra = ExtraLosses(ExtraLossOptions(perceptual_weight=1.0), TRUNK)
    assert extra.card() == {"perceptual": {"weight": 1.0, "network": "random"}}
    decoded = batch.clone()
    decoded[0] = 0.5
    trunk = torch.zeros(4, TRUNK, 4, 4)
    without = torch.tensor([0.0, 0.5, 0.25, 0.25])
    assert float(extra.terms(batch, decoded, trunk, 0.0, weight=without)["perceptual"]) < 1e-6
    assert float(extra.terms(batch, decoded, trunk, 0.0)["perceptual"]) > 1e-3


def test_a_restored_state_goes_on_alike(teacher, batch):
    options = ExtraLossOptions(
        perceptual_weight=0.1,
        adversarial_weight=0.1,
        adversarial_start=0.0,
        discriminator_width=8,
        semantic_weight=0.5,
    )

    def advance(extra, steps):
        for _ in range(steps):
            trunk = nn.functional.avg_pool2d(batch, 8).repeat(1, 6, 1, 1)[:, :TRUNK].requires_grad_()
            decoded = blurred(batch).requires_grad_()
            sum(extra.terms(batch, decoded, trunk, 0.5).values()).backward()
            extra.update(batch, decoded, 0.5)

    whole = ExtraLosses(options, TRUNK, teacher)
    advance(whole, 4)
    first = ExtraLosses(options, TRUNK, teacher)
    advance(first, 2)
    second = ExtraLosses(options, TRUNK, teacher)
    second.restore({name: value.clone() for name, value in first.state().items()})
    advance(second, 2)
    left, right = whole.state(), second.state()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_training_run_with_all_of_them_resumes_exactly(teacher, tmp_path):
    random = np.random.default_rng(0)
    sprites = random.integers(0, 255, (6, 96, 96, 4), np.uint8)
    digits, labels = random.integers(0, 255, (10, 28, 28), np.uint8), np.arange(10)
    pictures, source = canvases_of(sprites, (8, 8)), np.zeros(6, int)
    data = TrainingData(
        sprites, pictures, source, pictures, source, ("noise",), digits, labels, digits, labels
    )
    options = ExtraLossOptions(
        perceptual_weight=0.1,
        adversarial_weight=0.1,
        adversarial_start=0.1,
        discriminator_width=8,
        semantic_weight=0.5,
    )

    def begin(name):
        settings = TrainingOptions(batch_size=2, digit_share=0, other_share=0)
        run = _Run(data, VisionModelConfig(width=16), settings, tmp_path / name)
        run.extra = ExtraLosses(options, run.model.config.trunk_width, teacher)
        return run

    whole, first, second = begin("whole"), begin("parts"), begin("parts")
    for progress in (0.0, 0.2, 0.4):
        whole.advance(progress)
    whole.save()
    first.advance(0.0)
    first.advance(0.2)
    first.save()
    second.restore()
    second.advance(0.4)
    second.save()
    left, right = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "parts"))
    assert left.keys() == right.keys()
    assert {name.split(".")[1] for name in left if name.startswith("extra.")} == {
        "discriminator",
        "discriminator_optimizer",
        "semantic",
        "semantic_optimizer",
    }
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_extra_networks_leave_the_trainers_random_numbers_alone(teacher):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    ExtraLosses(ExtraLossOptions(adversarial_weight=1.0, semantic_weight=1.0), TRUNK, teacher)
    assert torch.equal(torch.rand(3), expected)


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="needs a teacher"):
        ExtraLosses(ExtraLossOptions(semantic_weight=1.0), TRUNK)
    with pytest.raises(InvalidInputError, match="negative"):
        ExtraLossOptions(perceptual_weight=-1)
    with pytest.raises(InvalidInputError, match="share of the run"):
        ExtraLossOptions(adversarial_start=30)
    with pytest.raises(UnavailableError, match="pip install"):
        load_teacher(tmp_path / "absent.pth")
    (tmp_path / "other.pth").write_bytes(b"not the file that is known")
    with pytest.raises(InvalidInputError, match="sha256"):
        load_teacher(tmp_path / "other.pth")


def test_the_teachers_shapes_and_folded_norms(teacher):
    maps = teacher.stages(torch.rand(1, 3, 64, 96))
    assert [tuple(part.shape[1:]) for part in maps] == [
        (channels, -(-64 // stride), -(-96 // stride))
        for channels, stride in zip(STAGE_CHANNELS, (2, 4, 8, 16, 16, 32, 32))
    ]
    assert teacher.cells(torch.rand(1, 3, 64, 96)).shape == (1, 112, 4, 6)
    cells, wholes = teacher.describe(torch.rand(2, 3, 64, 64))
    assert cells.shape == (2, 112, 4, 4) and wholes.shape == (2, 1280)
    # A convolution with its norm equals the folded one.
    random = torch.Generator().manual_seed(3)
    layers = {"_conv_stem": (teacher.stem, "_bn0"), "_conv_head": (teacher.head, "_bn1")}
    for index, block in enumerate(block for stage in teacher.body for block in stage):
        name = f"_blocks.{index}"
        if block.expand is not None:
            layers[f"{name}._expand_conv"] = (block.expand, f"{name}._bn0")
        layers[f"{name}._depthwise_conv"] = (block.filter, f"{name}._bn1")
        layers[f"{name}._project_conv"] = (block.project, f"{name}._bn2")
    tensors = {}
    for convolution, (layer, norm) in layers.items():
        tensors[f"{convolution}.weight"] = torch.randn(layer.weight.shape, generator=random)
        for part in ("weight", "bias", "running_mean", "running_var"):
            tensors[f"{norm}.{part}"] = torch.rand(len(layer.bias), generator=random)
    folded = Teacher()
    load_folded(folded, tensors)
    x = torch.rand(1, 3, 9, 9)
    norm = nn.BatchNorm2d(32, eps=1e-3).eval()
    norm.load_state_dict(
        {part: tensors[f"_bn0.{part}"] for part in ("weight", "bias", "running_mean", "running_var")},
        strict=False,
    )
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    expected = norm(nn.functional.conv2d(padded, tensors["_conv_stem.weight"], stride=2))
    torch.testing.assert_close(folded.stem(x), expected, atol=1e-4, rtol=1e-4)
