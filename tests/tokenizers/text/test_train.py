"""The recipe trains, is deterministic, balances its sources and says what it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie5.protocol.errors import InvalidInputError
from ernie5.tokenizers.text import TextTokenizer
from ernie5.tokenizers.text.sources import CODE_CHARACTERS, code, names
from ernie5.tokenizers.text.train import read_sources, train, within_budget

SENTENCES = [
    f"line {n}: the {word} of a small corpus, said {n * 7} times"
    for n in range(400)
    for word in ("cat", "sea")
]
POEM = ["床前明月光，疑是地上霜。", "這個國家來說對學會見門", "开门见山，我们说过话"] * 150


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "en.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    (folder / "zh.txt").write_text("\n".join(POEM), encoding="utf-8")
    (folder / "names.txt").write_text("猫脸\nсемь\n🐈", encoding="utf-8")
    return [folder / "en.txt", folder / "zh.txt", folder / "names.txt"]


def test_training_is_deterministic_and_writes_its_card(files: list[Path], tmp_path: Path) -> None:
    paths = [train(files[:2], tmp_path / run, 600, names=files[2], budget=20_000) for run in ("a", "b")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    tokenizer = TextTokenizer.load(paths[0])
    assert tokenizer.vocabulary_size == 600
    assert not tokenizer.is_byte[tokenizer.ids("猫脸 семь 🐈")].any()
    text = "the cat of a \u2581 small sea 床前\n ق 12"
    assert tokenizer.text(tokenizer.ids(text)) == text
    card = json.loads((tmp_path / "a" / "text.json").read_text(encoding="utf-8"))
    assert card["hash"] == tokenizer.hash
    assert set(card["files"]) == {"en.txt", "zh.txt", "names.txt"}
    assert all(0 < size <= 20_000 for size in card["training_bytes"].values())


def test_training_in_utf_16be_writes_line_ends_as_pieces(files: list[Path], tmp_path: Path) -> None:
    paths = [train(files[:2], tmp_path / run, 600, budget=20_000, fallback="utf-16be") for run in ("a", "b")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    tokenizer = TextTokenizer.load(paths[0])
    assert tokenizer.fallback == "utf-16be" and tokenizer.vocabulary_size == 600
    assert [len(tokenizer.ids(text)) for text in ("\n", "\t", "\r", "ق", "😀")] == [1, 1, 1, 2, 4]
    text = "the cat of a \u2581 small sea 床前\r\n\t ق 12"
    assert tokenizer.text(tokenizer.ids(text)) == text
    card = json.loads((tmp_path / "a" / "text.json").read_text(encoding="utf-8"))
    assert "UTF-16BE" in card["kind"] and "--fallback utf-16be" in card["command"]


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "picture.txt"
    path.write_bytes(b"\x89PNG")
    with pytest.raises(InvalidInputError, match=r"picture\.txt is not UTF-8"):
        train([path], tmp_path / "out")


def test_too_little_text_is_an_error_that_says_so(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't train 50000 pieces"):
        train(files[:1], tmp_path, 50_000)


def test_scripts_of_chinese_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "zh.txt"
    path.write_text("\n".join(["这们国时来"] * 80 + ["這們國時來"] * 80 + ["plain"] * 40), encoding="utf-8")
    sources = {source.name: source for source in read_sources(path)}
    assert set(sources) == {"zh", "zh-traditional"}
    assert set(sources["zh-traditional"].training + sources["zh-traditional"].held_out) == {"這們國時來"}


def test_held_out_lines_are_not_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "en.txt"
    lines = [f"line {number}" for number in range(5000)]
    path.write_text("\n".join(lines), encoding="utf-8")
    (source,) = read_sources(path)
    assert sorted(source.training + source.held_out) == sorted(lines)
    assert source.held_out and len(source.held_out) < len(source.training) / 10


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20)), st.integers(0, 500))
def test_a_budget_is_kept_and_lines_stay_in_order(lines: list[str], budget: int) -> None:
    kept = within_budget(lines, budget)
    assert sum(len(line.encode()) for line in kept) <= budget
    rest = iter(lines)
    assert all(line in rest for line in kept)
    if sum(len(line.encode()) for line in lines) <= budget:
        assert kept == lines


def test_names_are_short_texts_without_repetitions_of_skin_tones() -> None:
    pytest.importorskip("emoji", reason="the recipe's package emoji is not installed")
    lines = names().splitlines()
    assert {"cat face", "猫脸", "Draw: cat face", "Say: семь", "Which digit is this?"} <= set(lines)
    assert not any("skin tone" in line or "肤色" in line for line in lines)


def test_code_is_the_standard_library_within_its_budget() -> None:
    text = code()
    assert CODE_CHARACTERS < len(text) < 1.2 * CODE_CHARACTERS
    assert "class ConfigParser(RawConfigParser)" in text
