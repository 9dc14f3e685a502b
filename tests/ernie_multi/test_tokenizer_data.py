"""Corpora become what the tokenizers' recipes read: their loaders take it, and held out stays held out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ernie5.corpora.builders.progress import Report
from ernie5.corpora.corpus import Corpus, open_corpus
from ernie5.corpora.splits import HELD_OUT_VOICES, is_held_out
from ernie5.protocol.errors import InvalidInputError
from ernie5.tokenizers.audio.clips import DIGITS, Clips, MelStream
from ernie5.tokenizers.text.train import read_sources
from ernie5.tokenizers.vision.training.data import PICTURE_FILES, BatchSampler, load_training_data
from ernie_multi import cli, tokenizer_data

SILENT = Report(None, "test")
STEP = 20


class Thinned:
    """Every ``STEP``-th sample of a corpus, so that a test decodes dozens of items and not thousands."""

    def __init__(self, corpus: Corpus, step: int) -> None:
        self.corpus, self.numbers = corpus, range(0, len(corpus), step)

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[object]:
        return (self.corpus[number] for number in self.numbers)


@pytest.fixture
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_few(name: str, split: str, *, tasks: tuple[str, ...]) -> Thinned:
        return Thinned(open_corpus(name, split, tasks=tasks), STEP)

    monkeypatch.setattr(tokenizer_data, "open_corpus", open_few)


@pytest.fixture
def no_built_corpora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ERNIE_MULTI_DATA", str(tmp_path / "nothing"))


def test_the_vision_recipe_takes_the_pictures(few_items: None, tmp_path: Path) -> None:
    summary = tokenizer_data.write_vision(tmp_path, ["mini"], SILENT)
    data = load_training_data(tmp_path)
    written = sum(summary[f"{name}.npz"]["items"] for name in PICTURE_FILES)
    assert len(data.sprites) + len(data.held_out) == written > 20
    assert len(data.held_out) == sum(summary[f"{name}.npz"]["held out"] for name in PICTURE_FILES) > 0
    assert len(data.held_out_digits) == summary["mnist.npz"]["held out"] == 500 // STEP
    assert set(data.digit_labels) == set(data.held_out_labels) == set(range(10))
    sampler = BatchSampler(data, batch_size=4, digit_share=0.36, other_share=0.12, seed=0)
    for step in range(8):
        batch = sampler.draw(step)
        assert 0 <= float(batch.min()) < float(batch.max()) <= 1


def test_pictures_are_held_out_by_concept_in_every_style(few_items: None, tmp_path: Path) -> None:
    tokenizer_data.write_vision(tmp_path, ["mini"], SILENT)
    for file in ("emoji_noto", "emoji_twitter"):
        with np.load(tmp_path / f"{file}.npz", allow_pickle=False) as arrays:
            assert arrays["test"].tolist() == [is_held_out(name) for name in arrays["names"]]
    corpus = open_corpus("mini", "test", tasks={"digit_draw"})
    with np.load(tmp_path / "mnist.npz", allow_pickle=False) as arrays:
        labels = [int(corpus[number].metadata["label"]) for number in range(0, len(corpus), STEP)]
        assert arrays["y"][arrays["test"]].tolist() == labels


def test_the_video_recipe_takes_the_animations(tmp_path: Path) -> None:
    from ernie5.corpora.builders.licences import LICENCES
    from ernie5.corpora.builders.manifest import BuiltItem, by_split, write_corpus
    from ernie5.tokenizers.vision.video.files import write_clip

    names = [f"thing {number}" for number in range(30)]
    frames = [Image.new("RGB", (96, 96), (60 * place, 90, 200)) for place in range(4)]
    items = []
    for count, name in enumerate(names):
        clip, _ = write_clip(frames[: 2 + count % 3], 1000 / 84)
        about = {"label": name, "names": {"en": name}, "source": "motion"}
        split = "test" if is_held_out(name) else "train"
        items.append((split, BuiltItem(f"motion-{count:02d}", "named_clip", {"webp": clip}, about)))
    write_corpus(tmp_path / "clips", "clips", by_split("clips", items), LICENCES, {})
    summary = tokenizer_data.write_video(tmp_path, [str(tmp_path / "clips")], SILENT)
    with np.load(tmp_path / "motion.npz", allow_pickle=False) as arrays:
        assert arrays["frames"].shape == (summary["motion.npz"]["frames"], 64, 64, 3)
        assert list(np.diff(arrays["offsets"])) and arrays["offsets"][-1] == len(arrays["frames"])
        assert arrays["test"].tolist() == [is_held_out(name) for name in arrays["names"]]
        assert set(arrays["names"]) == set(names)


def test_white_around_a_drawing_becomes_transparent_and_white_inside_stays() -> None:
    drawing = np.full((96, 96, 3), 255, np.uint8)
    drawing[20:70, 30:80] = (200, 30, 40)
    drawing[40:50, 50:60] = 255
    sprite = tokenizer_data.sprite_of(Image.fromarray(drawing))
    assert sprite.shape == (96, 96, 4)
    assert np.array_equal(sprite[..., :3], drawing)
    opaque = np.zeros((96, 96), bool)
    opaque[20:70, 30:80] = True
    assert np.array_equal(sprite[..., 3], np.where(opaque, 255, 0))


def test_transparency_of_a_picture_is_kept_and_its_size_made_fit() -> None:
    picture = np.full((48, 48, 4), 255, np.uint8)
    picture[:24, :, 3] = 0
    sprite = tokenizer_data.sprite_of(Image.fromarray(picture))
    assert sprite.shape == (96, 96, 4)
    assert (sprite[:40, :, 3] == 0).all() and (sprite[56:, :, 3] == 255).all()


def test_the_audio_recipe_takes_the_clips(few_items: None, tmp_path: Path) -> None:
    summary = tokenizer_data.write_audio(tmp_path, ["mini"], SILENT)
    clips = Clips.load(tmp_path)
    assert len(clips) == summary["clips.npz"]["items"] > 50
    held_out = clips.split == "test"
    assert 0 < held_out.sum() < len(clips)
    assert held_out.tolist() == [voice in HELD_OUT_VOICES for voice in clips.voice]
    assert {"espeak", "human"} <= set(clips.kind) and set(clips.lang) == set(DIGITS)
    digits = clips.digit >= 0
    assert len(set(clips.digit[digits])) == 10
    assert len(MelStream.of(clips, np.flatnonzero(~held_out)).digits) == (digits & ~held_out).sum()


def test_clips_are_the_recordings_of_the_corpus(few_items: None, tmp_path: Path) -> None:
    tokenizer_data.write_audio(tmp_path, ["mini"], SILENT)
    clips = Clips.load(tmp_path)
    corpus = open_corpus("mini", "train", tasks={"speech_say"})
    with np.load(tmp_path / "clips.npz", allow_pickle=False) as arrays:
        labels = arrays["label"].tolist()
    train = list(range(0, len(corpus), STEP))
    assert labels[: len(train)] == [corpus[number].metadata["label"] for number in train]
    for clip in range(0, len(clips), 10):
        assert 0.1 < len(clips.waveform(clip)) / 16_000 < 1.4
        assert float(clips.waveform(clip).abs().max()) > 0.01


def test_the_text_recipe_takes_the_texts(tmp_path: Path) -> None:
    summary = tokenizer_data.write_text(tmp_path, ["mini"], SILENT)
    assert set(summary) == {"en.txt", "zh.txt", "code.txt", "names.txt"}
    for name in summary:
        assert summary[name]["bytes"] == (tmp_path / name).stat().st_size > 1000
    assert {source.name for source in read_sources(tmp_path / "zh.txt")} == {"zh", "zh-traditional"}
    names = (tmp_path / "names.txt").read_text("utf-8").splitlines()
    assert {"cat face", "Draw: cat face", "猫脸", "Say: siete", "Which digit is this?"} <= set(names)
    assert "    return" in (tmp_path / "code.txt").read_text("utf-8")


def test_equal_corpora_give_equal_files(few_items: None, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for writer in (tokenizer_data.write_vision, tokenizer_data.write_audio, tokenizer_data.write_text):
        for folder in (first, second):
            writer(folder, ["mini"], SILENT)
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir()) and len(files) == 10
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_an_interrupted_write_leaves_the_earlier_file(
    few_items: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer_data.write_audio(tmp_path, ["mini"], SILENT)
    before = (tmp_path / "clips.npz").read_bytes()

    def half_written(stream: object, **arrays: np.ndarray) -> None:
        stream.write(b"half")  # type: ignore[attr-defined]
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", half_written)
    with pytest.raises(OSError, match="disk full"):
        tokenizer_data.write_audio(tmp_path, ["mini"], SILENT)
    assert (tmp_path / "clips.npz").read_bytes() == before
    assert len(Clips.load(tmp_path)) > 50


@pytest.mark.parametrize(
    ("write", "missing"),
    [
        (tokenizer_data.write_vision, ("emoji", "stamps", "digits")),
        (tokenizer_data.write_audio, ("digits", "speech", "stamps", "sounds")),
        (partial(tokenizer_data.write_text, corpora=["mini", "text"]), ("text",)),
    ],
    ids=["vision", "audio", "text"],
)
def test_a_missing_corpus_is_named_with_the_command_that_builds_it(
    write: Callable[..., object], missing: tuple[str, ...], no_built_corpora: None, tmp_path: Path
) -> None:
    given = {} if isinstance(write, partial) else {"corpora": None}
    with pytest.raises(InvalidInputError) as refused:
        write(tmp_path / "out", report=SILENT, **given)
    for name in missing:
        assert f"ernie-multi corpus build {name}" in refused.value.message
    assert not (tmp_path / "out").exists()


def test_corpora_without_what_a_recipe_needs_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "a.txt").write_text("nothing to see")
    for write in (tokenizer_data.write_vision, tokenizer_data.write_audio):
        with pytest.raises(InvalidInputError, match="the corpora hold 0"):
            write(tmp_path / "out", [str(folder)], SILENT)
    assert not (tmp_path / "out").exists()


def test_the_command_writes_and_prints_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["tokenizer", "data", "text", "--out", str(tmp_path), "--corpora", "mini"])
    assert not ended.value.code
    printed = json.loads(capsys.readouterr().out)
    assert {name for name in printed} == {path.name for path in tmp_path.iterdir()}


def test_the_command_ends_in_one_line_where_a_corpus_is_missing(
    no_built_corpora: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["tokenizer", "data", "vision", "--out", str(tmp_path / "out"), "--corpora", "mini,stamps"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("ernie-multi: not built yet: stamps;")
