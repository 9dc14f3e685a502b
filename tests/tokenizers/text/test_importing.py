"""Models of others: made to bring every text back, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from ernie5.protocol.errors import InvalidInputError
from ernie5.tokenizers.text import TextTokenizer
from ernie5.tokenizers.text.importing import import_model, write_import
from ernie5.tokenizers.text.model_file import ModelFile, keeping_every_character
from ernie5.tokenizers.text.tokenizer import WEIGHTS
from ernie_multi.recipes.text import evaluate, import_text
from tests.tokenizers.text.models import trained

HARD = "  two  spaces \t\n\u2581 Ａﬁ½ e\u0301 👩\u200d👧 \0 龘 \U0010ffff "
UNIGRAM = {"model_type": "unigram", "vocab_size": 300}
KINDS: dict[str, dict[str, Any]] = {
    "prefix, as Llama's": {"add_dummy_prefix": True},
    "spaces removed": {"remove_extra_whitespaces": True},
    "nmt_nfkc, no bytes, as most": {
        "normalization_rule_name": "nmt_nfkc",
        "byte_fallback": False,
        "add_dummy_prefix": True,
        "remove_extra_whitespaces": True,
    },
    "folded case": {"normalization_rule_name": "nfkc_cf"},
    "suffix": {"treat_whitespace_as_suffix": True, "add_dummy_prefix": True},
    "unigram, bytes": UNIGRAM | {"vocab_size": 500, "add_dummy_prefix": True},
    "unigram, nfkc, no bytes": UNIGRAM | {"normalization_rule_name": "nfkc", "byte_fallback": False},
    "symbols of the user": {"user_defined_symbols": ["<x>", "▁▁", "\n"], "add_dummy_prefix": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_change_text_are_refused_as_they_are_and_imported_exactly(kind: str) -> None:
    data = trained(**KINDS[kind])
    with pytest.raises(InvalidInputError, match="tokenizer import"):
        TextTokenizer(data)
    model, changes = import_model(data)
    assert changes
    file, before = ModelFile.parse(model), ModelFile.parse(data)
    assert file.pieces[: len(before.pieces)] == before.pieces  # every id keeps its piece
    for fallback in ("utf-8", "utf-16be"):
        tokenizer = TextTokenizer(import_model(data, fallback=fallback)[0])
        assert tokenizer.fallback == fallback
        assert tokenizer.text(tokenizer.ids(HARD)) == HARD


def test_ids_are_the_original_s_where_it_changes_nothing() -> None:
    data = trained(**KINDS["nmt_nfkc, no bytes, as most"])
    original = sentencepiece.SentencePieceProcessor(model_proto=data)
    imported = TextTokenizer(import_model(data)[0])
    text = "The tokenizer's pieces, in the text"
    assert imported.ids(" " + text).tolist() == original.EncodeAsIds(text)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "normaliser .nmt_nfkc. replaces characters"),
        ({"add_dummy_prefix": True}, "puts a space in front"),
        ({"remove_extra_whitespaces": True}, "removes spaces"),
        ({"byte_fallback": False}, "256 of 256 byte pieces are missing"),
    ],
    ids=str,
)
def test_the_reason_is_named(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "foreign.model"
    path.write_bytes(trained(**options))
    with pytest.raises(InvalidInputError, match=rf"foreign\.model: .*{reason}"):
        TextTokenizer.load(path)


@pytest.mark.parametrize("model_type", ["word", "char"])
def test_other_kinds_of_model_are_not_imported(model_type: str) -> None:
    data = trained(model_type=model_type, byte_fallback=False, vocab_size=60, hard_vocab_limit=False)
    with pytest.raises(InvalidInputError, match=f"cuts by {model_type}; BPE and unigram"):
        import_model(data)


def test_a_model_that_keeps_every_text_is_taken_as_it_is() -> None:
    data = (WEIGHTS / "text.model").read_bytes()
    assert import_model(data) == (data, [])


@pytest.mark.parametrize("cut", [0, 1, 7, 100, 5000, -1, -30])
def test_a_truncated_file_is_refused_or_whole(cut: int) -> None:
    data = trained()
    try:
        tokenizer = TextTokenizer(data[:cut])
    except InvalidInputError:
        return
    assert tokenizer.text(tokenizer.ids(HARD)) == HARD


def test_damaged_files_never_crash() -> None:
    data = trained()
    for position in range(0, len(data), len(data) // 150):
        damaged = bytearray(data)
        damaged[position] ^= 0x15
        try:
            tokenizer = TextTokenizer(bytes(damaged))
        except InvalidInputError:
            continue
        tokenizer.text(tokenizer.ids(HARD))


def test_rewriting_keeps_what_it_does_not_change() -> None:
    data = trained(add_dummy_prefix=True)
    again = keeping_every_character(keeping_every_character(data))
    assert again == keeping_every_character(data)


def test_the_command_writes_model_and_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "foreign.model"
    source.write_bytes(trained(**KINDS["nmt_nfkc, no bytes, as most"]))
    import_text(source, tmp_path / "out", "utf-16be")
    assert "756 pieces, utf-16be" in capsys.readouterr().out
    card = json.loads((tmp_path / "out" / "text.json").read_text(encoding="utf-8"))
    tokenizer = TextTokenizer.load(tmp_path / "out")
    assert card["hash"] == tokenizer.hash and len(card["changes"]) == 4
    assert card["file"]["name"] == "foreign.model"
    text = tmp_path / "text.txt"
    text.write_text(HARD.replace("\0", ""), encoding="utf-8")
    evaluate([str(text), "--weights", str(tmp_path / "out")])
    assert "bytes_per_token" in capsys.readouterr().out


def test_a_missing_or_huge_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match=r"nowhere\.model"):
        write_import(tmp_path / "nowhere.model", tmp_path / "out")
    path = tmp_path / "large.model"
    path.write_bytes(trained())
    monkeypatch.setattr("ernie5.tokenizers.text.importing.MAX_MODEL_BYTES", 100)
    with pytest.raises(InvalidInputError, match="the limit is 100"):
        write_import(path, tmp_path / "out")
