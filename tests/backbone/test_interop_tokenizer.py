"""The exported tokenizer gives the ids of the text tokenizer, whatever the text."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie5.backbone.interop.tokenizer import marker_token, padded, why_not_lossless, write_tokenizer
from ernie5.corpora.corpus import open_corpus
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import MARKERS, UnifiedVocabulary
from ernie5.tokenizers.text.tokenizer import WEIGHTS, TextTokenizer
from tests.backbone.hugging_face import transformers

MODEL = (WEIGHTS / "text.model").read_bytes()
TEXT = TextTokenizer(MODEL)
VOCABULARY = UnifiedVocabulary(TEXT.vocabulary_size)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(MODEL, VOCABULARY, path)
    # AutoTokenizer looks at the network's type, for which some classes are forced.
    (path / "config.json").write_text('{"model_type": "ernie4_5_moe"}')
    return path


@pytest.fixture(scope="module")
def auto(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def check(auto: Any, text: str) -> None:
    ids = TEXT.ids(text).tolist()
    assert auto(text).input_ids == ids
    assert auto.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two leading, two trailing  ",
        "tab\tnewline\r\n\n\n" + " " * 37 + "x",
        "\u2581 is not a space, \u2581\u2581neither",
        "In the beginning God created the heaven and the earth.",
        "床前明月光，疑是地上霜。舉頭望明月，低頭思故鄉。",
        "Привет, мир! ¿Qué tal? œuvre ﬁ e\u0301 \u00e9",
        "🐱👩‍👩‍👧🇩🇪 \U00020bb7野家",
        "<unk> <0x41> </s> [MASK]",
        "def f(x):\n        return x  # \N{GREEK SMALL LETTER MU}",
        "\x00\x01\x7f",
        "1234567890" * 9,
        "-=" * 40 + "=" * 77 + "." * 33,
    ],
)
def test_text_has_the_same_ids(auto: Any, text: str) -> None:
    check(auto, text)


@pytest.mark.parametrize("file", ["README.md", "docs/tokenizers.md", "backbone/layout.py", "Makefile"])
def test_files_of_this_repository_have_the_same_ids(auto: Any, file: str) -> None:
    check(auto, (ROOT / file).read_text(encoding="utf-8"))


def test_the_texts_of_the_shipped_corpus_have_the_same_ids(auto: Any) -> None:
    corpus = open_corpus("mini", "test")
    texts = [
        segment.text
        for task in ("text", "emoji_name_en", "emoji_name_zh")
        for index in corpus.indices(task)
        for segment in corpus[index].segments
        if segment.text
    ]
    assert len("".join(texts)) > 10_000
    for text in texts:
        check(auto, text)


def test_chinese_pieces_have_the_same_ids_in_any_order(auto: Any) -> None:
    """Every piece of the vocabulary occurs, between neighbours it may merge with."""
    pieces = [TEXT.text([token]) for token in range(TEXT.vocabulary_size) if not TEXT.is_byte[token]]
    random.Random(0).shuffle(pieces)
    for start in range(0, len(pieces), 400):
        check(auto, "".join(pieces[start : start + 400]))


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("ab thein ▁-=.的一中國🐱é\n\t<>uk|0"), max_size=60))
def test_runs_of_few_characters_have_the_same_ids(auto: Any, text: str) -> None:
    check(auto, text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_has_the_same_ids(auto: Any, text: str) -> None:
    if not any(marker_token(VOCABULARY, slot) in text for slot in range(160)):
        check(auto, text)


def test_markers_are_special_tokens(auto: Any) -> None:
    for name in MARKERS:
        assert auto.convert_tokens_to_ids(f"<|{name}|>") == VOCABULARY.marker(name)
    assert len(auto) == VOCABULARY.size
    begin, end, pad = (VOCABULARY.marker(name) for name in ("begin_sample", "end_turn", "pad"))
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (begin, end, pad)
    ids = [begin, *TEXT.ids("a b").tolist(), end]
    assert auto("<|begin_sample|>a b<|end_turn|>").input_ids == ids
    assert auto.decode(ids, skip_special_tokens=True) == "a b"


def test_a_conversation_reads_as_in_training(auto: Any) -> None:
    turns = [("system", "S"), ("user", "Hi there"), ("assistant", "你好"), ("user", "Q1"), ("user", "Q2")]
    messages = [{"role": role, "content": text} for role, text in turns]

    def expected(count: int) -> list[int]:
        segments = tuple(
            TokenSegment(
                TokenSpan("text", SequenceLayout(TEXT.vocabulary_size), TEXT.ids(text), TEXT.hash),
                "target" if role == "assistant" else "context",
            )
            for role, text in turns[:count]
        )
        ids: list[int] = []
        for event, _ in TokenSequence("0", segments).events(VOCABULARY):
            ids += [event] if isinstance(event, int) else event.codes.tolist()
        return ids

    def rendered(count: int, prompt: bool) -> list[int]:
        text = auto.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)
        return auto(text).input_ids

    assert rendered(3, False) == expected(3)
    assert rendered(5, True) == [*expected(5), VOCABULARY.marker("target")]


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="8192 pieces, the model was trained with 100"):
        write_tokenizer(MODEL, UnifiedVocabulary(100), tmp_path)


def trained(**options: Any) -> bytes:
    """A small SentencePiece model of this kind, but for the options."""
    lines = [(ROOT / "docs" / "tokenizers.md").read_text(encoding="utf-8")] * 3
    model = io.BytesIO()
    plain = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("".join(lines).split("\n")),
        model_writer=model,
        vocab_size=500,
        minloglevel=2,
        **(plain | options),
    )
    return model.getvalue()


def test_a_foreign_tokenizer_with_control_pieces_is_exported_alike(tmp_path: Path) -> None:
    model = trained()  # <unk>, <s> and </s> before the bytes
    own = TextTokenizer(model)
    write_tokenizer(model, UnifiedVocabulary(500), tmp_path)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("The tokenizer  </s> <s>x", "词 and\tpieces"):
        assert auto(text).input_ids == own.ids(text).tolist()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"byte_fallback": False}, "byte_fallback"),
        ({"model_type": "unigram"}, "no BPE model"),
        ({"add_dummy_prefix": True}, "changes text"),
        ({"remove_extra_whitespaces": True}, "changes text"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes text"),
    ],
    ids=str,
)
def test_tokenizers_that_change_text_are_told_apart(options: dict[str, Any], reason: str) -> None:
    assert why_not_lossless(MODEL) is None
    found = why_not_lossless(trained(**options))
    assert found is not None and reason in found


def test_a_tokenizer_that_falls_back_to_utf_16_is_told_apart(tmp_path: Path) -> None:
    model = TextTokenizer(MODEL, fallback="utf-16be").model
    assert "utf-16be, not in UTF-8" in (why_not_lossless(model) or "")
    with pytest.raises(InvalidInputError, match="utf-16be"):
        write_tokenizer(model, UnifiedVocabulary(TEXT.vocabulary_size), tmp_path)


def test_padding_adds_pieces_that_text_never_becomes() -> None:
    longer = TextTokenizer(padded(MODEL, 8300))
    assert longer.vocabulary_size == 8300
    text = "In the beginning <|unused_8192|> 床前"
    assert longer.ids(text).tolist() == TEXT.ids(text).tolist()
    assert longer.text(longer.ids(text)) == text
    assert padded(MODEL, 8192) == MODEL
    with pytest.raises(InvalidInputError, match="8192 pieces, the network's vocabulary only 8191"):
        padded(MODEL, 8191)
