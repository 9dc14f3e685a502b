"""The recipe: it learns, its checkpoint resumes exactly, and its output is a tokenizer."""

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from ernie5.kernels.scales import accumulate, quantise
from ernie5.protocol.grids import GRIDS, schedule_for
from ernie5.tokenizers.vision import VisionTokenizer
from ernie5.tokenizers.vision.model import VisionModel, VisionModelConfig
from ernie5.tokenizers.vision.training.data import BatchSampler, TrainingData, canvases_of, load_training_data
from ernie5.tokenizers.vision.training.metrics import bit_entropies, psnr, ssim
from ernie5.tokenizers.vision.training.optimizer import orthogonalise
from ernie5.tokenizers.vision.training.quantiser import BitBalance, quantise_straight_through
from ernie5.tokenizers.vision.training.train import TrainingOptions, train

SMALL = VisionModelConfig(width=16, bit_widths=(12, 16))
OPTIONS = TrainingOptions(batch_size=4, evaluate_seconds=1e9, seed=3)


@pytest.fixture(scope="module")
def data():
    """Drawn shapes on transparent ground, and drawn digits."""
    random = np.random.default_rng(0)
    sprites = []
    for _ in range(24):
        sprite = Image.new("RGBA", (96, 96))
        left, top = random.integers(0, 40, 2)
        colour = tuple(random.integers(0, 255, 3).tolist())
        ImageDraw.Draw(sprite).ellipse((left, top, left + 50, top + 40), fill=colour)
        sprites.append(np.asarray(sprite))
    digits = []
    for label in range(20):
        digit = Image.new("L", (28, 28))
        ImageDraw.Draw(digit).text((8, 4), str(label % 10), fill=255, font_size=20)
        digits.append(np.asarray(digit))
    sprite_array, digit_array = np.stack(sprites), np.stack(digits)
    labels = np.arange(20) % 10
    return TrainingData(
        sprites=sprite_array[:20],
        pictures=canvases_of(sprite_array[:20], (8, 8)),
        source=np.zeros(20, int),
        held_out=canvases_of(sprite_array[20:], (8, 8)),
        held_out_source=np.zeros(4, int),
        sources=("shapes",),
        digits=digit_array,
        digit_labels=labels,
        held_out_digits=digit_array,
        held_out_labels=labels,
    )


def test_a_run_learns_and_ends_in_a_tokenizer(data, tmp_path):
    figures = train(data, out=tmp_path, steps=150, config=SMALL, options=OPTIONS, card={"licences": "none"})
    untrained = train(data, out=tmp_path / "untrained", steps=0, config=SMALL, options=OPTIONS)
    for bits in (12, 16):
        told = figures[str(bits)]
        assert told["psnr"] > untrained[str(bits)]["psnr"] + 3
        assert len(told["psnr_by_scales_kept"]) == 4
        assert told["bits_per_pixel"] == pytest.approx(85 * bits / 4096)
    card = json.loads((tmp_path / "image.json").read_text())
    assert card["steps"] == 150 and card["licences"] == "none" and card["config"]["width"] == 16
    assert Image.open(tmp_path / "samples.png").size == (16 * 64 * 3 // 2, (6 * 64 + 2 * 32) * 3 // 2)
    tokenizer = VisionTokenizer.load(tmp_path / "image.safetensors", "cpu", bits=16)
    canvas = data.held_out[0].transpose(1, 2, 0)
    decoded = np.asarray(tokenizer.decode(tokenizer.encode(Image.fromarray(canvas))))
    error = float(np.mean((decoded / 255.0 - canvas / 255.0) ** 2))
    assert -10 * np.log10(error) > figures["16"]["psnr"] - 8


def test_a_resumed_run_equals_the_uninterrupted_one(data, tmp_path):
    """Every batch is a function of (seed, step), and the checkpoint holds all that a step changes."""
    from ernie5.tokenizers.vision.training.train import _Run

    whole = _Run(data, SMALL, OPTIONS, tmp_path / "whole")
    for _ in range(6):
        whole.advance(0.1)
    first = _Run(data, SMALL, OPTIONS, tmp_path / "parts")
    for _ in range(3):
        first.advance(0.1)
    first.save()
    second = _Run(data, SMALL, OPTIONS, tmp_path / "parts")
    second.restore()
    assert second.step == 3
    for _ in range(3):
        second.advance(0.1)
    for kind in ("whole", "parts"):
        {"whole": whole, "parts": second}[kind].save()
    left, right = (load_file(tmp_path / kind / "checkpoint.safetensors") for kind in ("whole", "parts"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_bound_is_needed(data, tmp_path):
    with pytest.raises(ValueError, match="either minutes or steps"):
        train(data, out=tmp_path)
    with pytest.raises(FileNotFoundError, match="corpus build"):
        load_training_data(tmp_path)


def test_batches_are_functions_of_the_step_and_reach_every_grid(data):
    sampler = BatchSampler(data, batch_size=2, digit_share=0.3, other_share=0.6, seed=1)
    seen = set()
    for step in range(150):
        batch = sampler.draw(step)
        assert batch.shape[1] == 3 and batch.min() >= 0 and batch.max() <= 1
        seen.add((batch.shape[2] // 8, batch.shape[3] // 8))
    assert seen == {grid for grid in GRIDS if grid[0] * grid[1] <= 64}
    assert torch.equal(sampler.draw(7), sampler.draw(7))


@pytest.mark.parametrize("grid", [(8, 8), (6, 10), (4, 16)])
def test_the_training_quantiser_is_the_one_in_use(grid):
    latent = torch.randn(3, 16, *grid, generator=torch.Generator().manual_seed(0)).requires_grad_()
    schedule = schedule_for(grid)
    total = quantise_straight_through(latent, schedule).total
    codes = quantise(latent.detach(), schedule)
    torch.testing.assert_close(total.detach(), accumulate(codes, schedule, 16), atol=1e-5, rtol=0)
    total.square().sum().backward()
    assert float(latent.grad.abs().sum()) > 0
    kept = torch.tensor([1, 2, len(schedule)])
    partial = quantise_straight_through(latent, schedule, kept).total
    for item, upto in enumerate(kept.tolist()):
        expected = accumulate([code[item] for code in codes], schedule, 16, upto)
        torch.testing.assert_close(partial[item].detach(), expected, atol=1e-5, rtol=0)


def test_a_width_in_training_draws_what_the_tokenizer_of_that_width_draws():
    """Training masks channels of one latent; the tokenizer codes the low bits and knows of no others."""
    torch.manual_seed(0)
    model = VisionModel(SMALL).eval()
    pictures = torch.rand(2, 3, 48, 48)
    schedule = schedule_for((6, 6))
    with torch.no_grad():
        latent = model.encode(pictures)[1]
        total = quantise_straight_through(latent, schedule, bits=torch.tensor([12, 16])).total
        codes = quantise(latent, schedule)
        narrow = quantise(model.latent_of_width(latent, 12), schedule)
        assert all(torch.equal(low, full & 0xFFF) for low, full in zip(narrow, codes))
        for item, (bits, parts) in enumerate(((12, narrow), (16, codes))):
            drawn = model.decode(accumulate([part[item : item + 1] for part in parts], schedule, bits))
            torch.testing.assert_close(model.decode(total[item : item + 1]), drawn, atol=1e-5, rtol=0)


def test_every_channel_keeps_its_spread_and_the_loss_does_not_push_it(data, tmp_path):
    from ernie5.tokenizers.vision.training.train import _Run, _tangential

    run = _Run(data, SMALL, OPTIONS, tmp_path)
    with torch.no_grad():
        run.model.to_latent.weight[12:] *= 0.1  # the channels that only the larger width uses, faint
    for _ in range(41):
        run.advance(0.5)
    spread = run.model.encode(run.sampler.plain(24, 0))[1].detach().std((0, 2, 3)) * 16**0.5
    assert float(spread.min()) > 0.9 and float(spread.max()) < 2.2
    gradient, latent = torch.randn(2, 3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    along = _tangential(gradient, latent)
    assert float(along.mean((0, 2, 3)).abs().max()) < 1e-6
    assert float((along * latent).mean((0, 2, 3)).abs().max()) < 1e-6
    assert float(along.abs().mean()) > 0.5


def test_balance_pushes_a_bit_that_is_always_set_towards_the_middle():
    balance, soft = BitBalance(), torch.tensor([0.9, 0.5, 0.1], requires_grad=True)
    for _ in range(200):
        loss = balance.loss([soft], (1, 1))
    loss.backward()
    assert soft.grad[0] > 0 > soft.grad[2] and abs(soft.grad[1]) < 1e-3
    other = BitBalance()
    other.restore(balance.state())
    assert torch.equal(other.shares[1, 1], balance.shares[1, 1])


def test_orthogonalise_levels_singular_values():
    matrices = torch.randn(2, 24, 90, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_metrics_know_equal_and_different_pictures():
    picture = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert psnr(picture, picture).min() == pytest.approx(100)
    assert ssim(picture, picture).min() == pytest.approx(1, abs=1e-5)
    assert psnr(picture, (picture - 0.1)).mean() == pytest.approx(20, abs=1e-3)
    assert ssim(picture, 1 - picture).max() < 0
    assert bit_entropies(torch.tensor([0b01, 0b10]), 2).mean() == pytest.approx(1)
    assert bit_entropies(torch.tensor([0b01, 0b11]), 2).tolist() == pytest.approx([0, 1], abs=1e-6)
