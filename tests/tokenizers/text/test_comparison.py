"""Other tokenizers are measured on the same blocks of text, and what can't be read is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ernie5.protocol.errors import InvalidInputError
from ernie5.tokenizers.text.comparison import ForeignTokenizer, bytes_per_token, foreign, texts_of
from ernie_multi.recipes.text import evaluate


def test_bytes_per_token_and_exactness_are_counted() -> None:
    lines = ["four", "五"] * 30
    pairs = ForeignTokenizer(1, lambda text: range(0, len(text), 2), lambda ids: "?")
    letters = ForeignTokenizer(256, lambda text: text.encode(), lambda ids: bytes(ids).decode())
    assert bytes_per_token(letters, {"a": lines}) == {"vocabulary_size": 256, "a": 1.0, "exact": True}
    figures = bytes_per_token(pairs, {"a": lines})
    assert figures["a"] == round(30 * 9 / (30 * 7 / 2), 3) and figures["exact"] is False


def test_a_tokenizer_json_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "ab": 2, "\n": 3}
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.decoder = package.decoders.Fuse()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    text = tmp_path / "text.txt"
    text.write_text("ab\nab", encoding="utf-8")
    assert bytes_per_token(foreign(path), texts_of([text])) == {
        "vocabulary_size": 4,
        str(text): 1.5,
        "exact": True,
    }
    evaluate([str(text), "--against", str(path), "--out", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures[f"against {path}"]["exact"] is True and figures[str(text)]["tokens"] == 3
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="holds no tokenizer"):
        foreign(path)
    with pytest.raises(InvalidInputError, match="there is no file"):
        foreign(tmp_path / "nowhere.json")


def test_held_out_lines_are_those_of_training(tmp_path: Path) -> None:
    path = tmp_path / "en.txt"
    path.write_text("\n".join(f"line {number}" for number in range(5000)), encoding="utf-8")
    (lines,) = texts_of([path], held_out=True).values()
    assert 0 < len(lines) < 250
