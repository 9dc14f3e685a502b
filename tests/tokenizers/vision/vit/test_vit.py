"""The semantic encoder: any grid, alone or in a batch; its recipe learns, resumes exactly, is measured."""

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch import nn

from ernie5.protocol.errors import UnavailableError
from ernie5.protocol.grids import GRIDS
from ernie5.tokenizers.vision import VisionTokenizer
from ernie5.tokenizers.vision.model import VisionModel, VisionModelConfig
from ernie5.tokenizers.vision.training.data import TrainingData, canvases_of
from ernie5.tokenizers.vision.training.teacher import Teacher
from ernie5.tokenizers.vision.vit.evaluation import COLOURS, main_colour, probe, retrieval
from ernie5.tokenizers.vision.vit.model import VitConfig, VitModel, load_vit, save_vit
from ernie5.tokenizers.vision.vit.targets import VitData, ask_teacher, canvas_of, draw_views
from ernie5.tokenizers.vision.vit.train import VitOptions, _Run, train_vit
from ernie5.tokenizers.vision.weights_file import save_weights

SMALL = VitConfig(width=16, layers=2, heads=2, hidden=32)
OPTIONS = VitOptions(batch_size=8, seed=3)
_SHAPES = ("ellipse", "rectangle", "line", "triangle")
_COLOURS = {"red": (230, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 230)}


def drawing(shape, colour, shift):
    sprite = Image.new("RGBA", (96, 96))
    draw = ImageDraw.Draw(sprite)
    box = (16 + shift, 16, 72 + shift, 76)
    if shape == "line":
        draw.line(box, fill=_COLOURS[colour], width=14)
    elif shape == "triangle":
        draw.polygon([(44 + shift, 16), (16 + shift, 76), (72 + shift, 76)], fill=_COLOURS[colour])
    else:
        getattr(draw, shape)(box, fill=_COLOURS[colour])
    return np.asarray(sprite)


@pytest.fixture(scope="module")
def data():
    """Two sources draw twelve things, the second a bit to the right; blue ones are held out. Drawn digits."""
    sprites, names, source = [], [], []
    for number, shift in enumerate((0, 6)):
        for shape in _SHAPES:
            for colour in _COLOURS:
                sprites.append(drawing(shape, colour, shift))
                names.append(f"{colour} {shape}")
                source.append(number)
    digits = []
    for label in range(40):
        digit = Image.new("L", (28, 28))
        ImageDraw.Draw(digit).text((8, 4), str(label % 10), fill=255, font_size=20)
        digits.append(np.asarray(digit))
    sprite, digit = np.stack(sprites), np.stack(digits)
    test = np.array([name.startswith("blue") for name in names])
    arrays = TrainingData(
        sprites=sprite[~test],
        pictures=canvases_of(sprite[~test], (8, 8)),
        source=np.array(source)[~test],
        held_out=canvases_of(sprite[test], (8, 8)),
        held_out_source=np.array(source)[test],
        sources=("left", "right"),
        digits=digit[:30],
        digit_labels=np.arange(30) % 10,
        held_out_digits=digit[30:],
        held_out_labels=np.arange(30, 40) % 10,
    )
    kept = [tuple(name for name, held in zip(names, test) if held == wanted) for wanted in (False, True)]
    return VitData(arrays, *kept)


@pytest.fixture(scope="module")
def teacher():
    teacher = Teacher()
    random = torch.Generator().manual_seed(0)
    for parameter in teacher.parameters():
        if parameter.ndim == 4:
            nn.init.kaiming_normal_(parameter, generator=random)
    return teacher


def lively():
    """A model whose every layer does something, as after training."""
    torch.manual_seed(1)
    model = VitModel(SMALL)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("grid", [*GRIDS, (3, 5), (1, 1)])
def test_any_grid_gives_a_vector_a_cell(grid):
    pictures = torch.rand(2, 3, 8 * grid[0], 8 * grid[1], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        features = lively()(pictures)
    assert features.shape == (2, SMALL.width, *grid) and bool(features.isfinite().all())
    assert not torch.equal(features[0], features[1])


def test_positions_tell_rows_from_columns():
    """Swapping two cells of a picture does more than swap two vectors, and a transposed picture differs."""
    model = lively()
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    swapped = picture.clone()
    swapped[..., :8, :8], swapped[..., 16:24, 8:16] = picture[..., 16:24, 8:16], picture[..., :8, :8]
    with torch.inference_mode():
        before, after = model(picture), model(swapped)
        turned = model(picture.transpose(2, 3)).transpose(2, 3)
    assert float((before[..., 3, 3] - after[..., 3, 3]).abs().max()) > 1e-3
    assert float((before - turned).abs().max()) > 1e-2


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="multiple of 8 pixels"):
        VitModel(SMALL)(torch.rand(1, 3, 20, 16))
    with pytest.raises(ValueError, match="rotary"):
        VitConfig(width=18, heads=2)


def test_weights_come_back_and_others_are_refused(tmp_path):
    model = lively().half().float()
    save_vit(model, tmp_path / "vit.safetensors", {"data": "none"})
    loaded, card = load_vit(tmp_path / "vit.safetensors")
    picture = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(loaded(picture), model(picture))
    assert card["data"] == "none"
    save_vit(VitModel(SMALL), tmp_path / "other.safetensors", {})
    (tmp_path / "other.safetensors").replace(tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match="its card says"):
        load_vit(tmp_path / "vit.safetensors")
    with pytest.raises(UnavailableError, match="tokenizer train vit"):
        load_vit(tmp_path / "absent.safetensors")


def test_the_tokenizer_gives_both_features_when_asked(tmp_path):
    """Codes stay the same; the hash tells the two apart, for spans are cached with their features."""
    torch.manual_seed(0)
    save_weights(VisionModel(VisionModelConfig(width=16)), tmp_path / "image.safetensors", {})
    save_vit(lively(), tmp_path / "vit.safetensors", {})
    plain = VisionTokenizer.load(tmp_path / "image.safetensors", "cpu")
    seeing = VisionTokenizer.load(tmp_path / "image.safetensors", "cpu", vit=tmp_path / "vit.safetensors")
    pictures = [
        Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, np.uint8))
        for seed, size in enumerate([(64, 64, 3), (64, 64, 3), (40, 120, 3)])
    ]
    together = seeing.encode_batch(pictures)
    for picture, span in zip(pictures, together):
        one, without = seeing.encode(picture), plain.encode(picture)
        assert set(without.features) == {"cnn"} and without.tokenizer == plain.hash != seeing.hash
        assert set(span.features) == {"cnn", "vit"} and span.tokenizer == seeing.hash
        np.testing.assert_array_equal(span.codes, without.codes)
        np.testing.assert_array_equal(span.features["cnn"], without.features["cnn"])
        # Alone or in a batch, to the bit.
        np.testing.assert_array_equal(span.features["vit"], one.features["vit"])
        assert span.features["vit"].shape == (len(span.features["cnn"]), 4, SMALL.width)
        assert span.features["vit"].dtype == np.float16
        assert seeing.encode(picture, features=False).features == {}
    # The four vectors of a token are its 2x2 cells.
    canvas = torch.from_numpy(np.asarray(pictures[0]).copy()).permute(2, 0, 1)[None].float() / 255
    with torch.inference_mode():
        cells = load_vit(tmp_path / "vit.safetensors")[0](canvas)[0]
    np.testing.assert_allclose(
        together[0].features["vit"][5],
        cells[:, 2:4, 2:4].flatten(1).T.numpy(),
        atol=2e-2,
    )


def test_views_show_the_drawing(data):
    sprites = data.arrays.sprites[:6]
    plain = draw_views(sprites, canvas_of((8, 8)), None)
    # The plain view is the tokenizer's canvas but for the filter at edges.
    canvas = torch.from_numpy(data.arrays.pictures[:6].copy()).float() / 255
    assert plain.shape == canvas.shape
    assert float((plain - canvas).abs().mean()) < 0.02
    oblong = draw_views(sprites, canvas_of((4, 12)), torch.Generator().manual_seed(0))
    assert oblong.shape == (6, 3, 32, 96) and float(oblong.std()) > 0.05
    again = draw_views(sprites, canvas_of((4, 12)), torch.Generator().manual_seed(0))
    assert torch.equal(oblong, again)


def test_the_teacher_is_asked_once(data, teacher, tmp_path, monkeypatch):
    """Answers are kept, an interrupted call goes on, and answers for other drawings are not taken."""
    sprites = np.concatenate([data.arrays.sprites] * 5)
    monkeypatch.setattr("ernie5.tokenizers.vision.vit.targets._SAVE_BATCHES", 1)
    asked = []
    describe = Teacher.describe

    def interrupted(self, pictures):
        asked.append(len(pictures))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return describe(self, pictures)

    monkeypatch.setattr(Teacher, "describe", interrupted)
    path = tmp_path / "targets.safetensors"
    with pytest.raises(KeyboardInterrupt):
        ask_teacher(sprites, teacher, path)
    targets = ask_teacher(sprites, teacher, path)
    assert sum(asked[2:]) == len(sprites) - 32
    assert targets.cells.shape == (len(sprites), 112, 8, 8) and targets.wholes.shape == (len(sprites), 1280)
    count = len(data.arrays.sprites)
    torch.testing.assert_close(
        targets.wholes[:count], targets.wholes[count : 2 * count], atol=1e-2, rtol=1e-2
    )
    asked[:] = [0, 0]
    again = ask_teacher(sprites, teacher, path)
    assert torch.equal(again.cells, targets.cells) and asked == [0, 0]
    assert len(ask_teacher(sprites[:9], teacher, path).wholes) == 9


@pytest.mark.parametrize("taught", [True, False], ids=["teacher", "labels only"])
def test_a_run_learns_and_ends_in_weights_and_figures(taught, data, teacher, tmp_path):
    figures = train_vit(
        data,
        teacher if taught else None,
        out=tmp_path,
        steps=60,
        config=SMALL,
        options=OPTIONS,
        categories={"blue ellipse": "round", "red ellipse": "round", "red rectangle": "straight"},
    )
    curve = json.loads((tmp_path / "metrics.json").read_text())["curve"]
    assert curve[-1]["step"] == 60
    assert set(curve[-1]) >= ({"cell", "whole", "concept"} if taught else {"concept"})
    if taught:
        assert curve[-1]["whole"] < 0.99 and curve[-1]["cell"] < 0.99  # running means; 1 is ignorance
    _, card = load_vit(tmp_path / "vit.safetensors")
    assert card["teacher"] == ("efficientnet-lite0" if taught else None) and card["steps"] == 60
    assert set(figures) >= {"items", "chance", "pixels", "vit"}
    assert figures["items"]["concept_across_styles"] == 8
    assert set(figures["vit"]) == {"concept_across_styles", "colour", "style", "category", "digit"}


def test_a_resumed_run_equals_the_uninterrupted_one(data, teacher, tmp_path):
    targets = ask_teacher(data.arrays.sprites, teacher, tmp_path / "targets.safetensors")
    whole = _Run(data, targets, SMALL, OPTIONS, tmp_path / "whole")
    for _ in range(8):
        whole.advance(0.1)
    first = _Run(data, targets, SMALL, OPTIONS, tmp_path / "parts")
    for _ in range(4):
        first.advance(0.1)
    first.save()
    second = _Run(data, targets, SMALL, OPTIONS, tmp_path / "parts")
    second.restore()
    assert second.step == 4
    for _ in range(4):
        second.advance(0.1)
    whole.save()
    second.save()
    left, right = (load_file(tmp_path / kind / "checkpoint.safetensors") for kind in ("whole", "parts"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_bound_is_needed(data, tmp_path):
    with pytest.raises(ValueError, match="either minutes or steps"):
        train_vit(data, None, out=tmp_path)


def test_a_probe_reads_what_is_there_and_nothing_else():
    random = torch.Generator().manual_seed(0)
    features = torch.randn(300, 12, generator=random)
    labels = (features[:, 3] > 0).long().numpy() + 2 * (features[:, 7] > 0).long().numpy()
    assert probe(features[:200], labels[:200], features[200:], labels[200:]) > 0.7  # of 0.25 by chance
    guesses = torch.randint(4, (300,), generator=random).numpy()
    assert probe(features[:200], guesses[:200], features[200:], guesses[200:]) < 0.45


def test_retrieval_across_styles(data):
    shapes = [_SHAPES.index(name.split()[1]) for name in data.held_out_names]
    known = torch.eye(4)[shapes] + 0.1 * torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert retrieval(known, data) == 1
    # Every drawing of the second source takes the next shape's place.
    wrong = known.clone()
    wrong[4:] = known[4:].roll(1, 0)
    assert retrieval(wrong, data) == 0


def test_main_colours():
    def plain(*colour):
        return np.broadcast_to(np.array(colour, np.uint8)[:, None, None], (3, 16, 16))

    pictures = [(200, 200, 200), (250, 20, 20), (250, 140, 20), (240, 240, 20), (30, 220, 40), (30, 60, 240)]
    found = main_colour(np.stack([plain(*colour) for colour in pictures]))
    assert [COLOURS[index] for index in found] == ["grey", "red", "orange", "yellow", "green", "blue"]
