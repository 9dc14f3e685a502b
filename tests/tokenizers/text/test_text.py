"""The shipped text tokenizer: exact round trips, limits, errors, streaming."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ernie5.protocol.errors import (
    ErnieMultiError,
    InvalidInputError,
    InvalidMediaError,
    MediaTooLargeError,
    TokenizerMismatchError,
    UnsupportedMediaError,
)
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import SequenceLayout, TokenSpan
from ernie5.tokenizers.base import Medium, Tokenizer
from ernie5.tokenizers.text import TextTokenizer
from ernie5.tokenizers.text.tokenizer import MAX_TEXT_BYTES, WEIGHTS

TOKENIZER = TextTokenizer.load()
AGAIN = TextTokenizer.load(WEIGHTS)
# Characters that tokenizers of this family are known to lose, between any others.
awkward = st.sampled_from(
    [
        *["\u2581", " ", "  ", "\n", "\r\n", "\t", "\0", "\ufeff", "\u200b", "\u200d", "\u0301", "\u2585"],
        *["\u2047", "\ufffd", "\U0010ffff", "\uffff", "👩\u200d👩\u200d👧\u200d👦", "e\u0301", "\u00e9"],
        *["<unk>", "<s>", "</s>", "<0x41>", "猫", "7"],
    ]
)
strings = st.lists(awkward | st.text(st.characters(codec="utf-8"), max_size=5)).map("".join)


@given(strings)
@example("")
@example("\u2581")
@example(" \u2581 \u2581\u2581")
@example("  leading, trailing and  double  ")
@example("\n\n    def f():\n\treturn '\0'\r\n")
@example("👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301\u0323 ก็ 한국어 ﷽")
@example("<0x41><s></s><unk><pad>")
@example("床前明月光，疑是地上霜。")
def test_any_string_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.text(TOKENIZER.ids(text)) == text
    span = TOKENIZER.encode(text)
    assert (span.codes.dtype, span.layout) == (np.int32, SequenceLayout(TOKENIZER.vocabulary_size))
    assert TOKENIZER.decode(span) == text


@given(strings)
def test_ids_are_deterministic_and_in_range(text: str) -> None:
    ids = TOKENIZER.ids(text)
    assert np.array_equal(ids, AGAIN.ids(text))
    assert ids.dtype == np.int32
    assert ((ids > 0) & (ids < 8192)).all()  # id 0 is <unk>, which byte fallback never needs


@given(st.lists(st.integers(0, 8191)), st.data())
def test_streamed_text_equals_text_at_once_and_never_holds_half_a_character(
    ids: list[int], data: st.DataObject
) -> None:
    decoder = TOKENIZER.incremental_decoder()
    emitted, start = [], 0
    while start < len(ids):
        size = data.draw(st.integers(1, 4))
        emitted.append(decoder.push(ids[start : start + size]))
        start += size
    emitted.append(decoder.finish())
    assert "".join(emitted) == TOKENIZER.text(ids)


@given(strings)
def test_a_stream_of_a_real_text_shows_only_its_characters(text: str) -> None:
    decoder = TOKENIZER.incremental_decoder()
    shown = ""
    for token in TOKENIZER.ids(text):
        shown += decoder.push(int(token))
        assert text.startswith(shown)
    assert decoder.finish() == "" and shown == text


def test_bytes_of_a_character_are_held_until_it_is_complete() -> None:
    ids = [token for token in TOKENIZER.ids("\u2581")]
    decoder = TOKENIZER.incremental_decoder()
    assert [decoder.push(int(token)) for token in ids] == ["", "", "\u2581"]
    decoder = TOKENIZER.incremental_decoder()
    assert decoder.push(int(ids[0])) == "" and decoder.finish() == "\ufffd"


@pytest.mark.parametrize("digits", ["0", "2026", "3.14159", "1,000,000", "a1b22c333"])
def test_each_digit_is_its_own_piece(digits: str) -> None:
    pieces = [TOKENIZER.text([token]) for token in TOKENIZER.ids(digits)]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == [
        c for c in digits if c.isdigit()
    ]


@pytest.mark.parametrize(
    ("text", "limit"), [("猫脸", 2), ("七", 1), ("семь", 4), ("    return x", 3), ("seven", 3)]
)
def test_the_words_of_the_tasks_are_short(text: str, limit: int) -> None:
    ids = TOKENIZER.ids(text)
    assert len(ids) <= limit and not TOKENIZER.is_byte[ids].any()


def test_text_up_to_the_limit_is_taken_and_beyond_it_refused() -> None:
    text = ("word " * MAX_TEXT_BYTES)[:MAX_TEXT_BYTES]
    assert TOKENIZER.text(TOKENIZER.ids(text)) == text
    for beyond in (text + "x", "猫" * (MAX_TEXT_BYTES // 3 + 1), "x" * (50 * MAX_TEXT_BYTES)):
        with pytest.raises(MediaTooLargeError, match=str(MAX_TEXT_BYTES)):
            TOKENIZER.ids(beyond)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ude00\ud83d"])
def test_a_lone_surrogate_is_bad_media(text: str) -> None:
    with pytest.raises(InvalidMediaError, match=r"lone surrogate U\+D[0-9A-F]{3} at \d"):
        TOKENIZER.encode(text)


@pytest.mark.parametrize("ids", [[-1], [8192], [5, 2**31 - 1]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=r"\[0, 8192\)"):
        TOKENIZER.text(ids)


def test_it_is_a_tokenizer_of_text_and_code() -> None:
    assert isinstance(TOKENIZER, Tokenizer)
    assert TOKENIZER.modalities == ("text", "code")
    assert TOKENIZER.encode("x = 1", "code").modality == "code"
    with pytest.raises(UnsupportedMediaError, match="image"):
        TOKENIZER.encode("x", "image")


def test_a_bad_segment_leaves_its_neighbours_untouched() -> None:
    segments = [
        Segment(modality="text", text="one"),
        Segment(modality="text", data=b"\xff\xfe"),
        Segment(modality="text", text="\ud800"),
        Segment(modality="image", data=b"x"),
        Segment(modality="text", reference="far/away.txt"),
        Segment(modality="text", data=b"x" * (MAX_TEXT_BYTES + 1)),
        Segment(modality="code", data="zwei — 二".encode()),
        Segment(modality="text", text=""),
    ]
    results = TOKENIZER.encode_segments(segments)
    assert [type(result) for result in results] == [
        TokenSpan,
        InvalidMediaError,
        InvalidMediaError,
        UnsupportedMediaError,
        InvalidMediaError,
        MediaTooLargeError,
        TokenSpan,
        TokenSpan,
    ]
    for segment, result in zip(segments, results):
        alone = TOKENIZER.encode_segments([segment])[0]
        assert alone == result if isinstance(result, TokenSpan) else str(alone) == str(result)


def test_spans_decode_to_plain_text() -> None:
    spans = [TOKENIZER.encode("猫 \u2581"), TOKENIZER.encode("x", "code")]
    expected = [
        Medium("猫 \u2581".encode(), "text/plain; charset=utf-8"),
        Medium(b"x", "text/plain; charset=utf-8"),
    ]
    assert TOKENIZER.decode_spans(spans) == expected
    assert TOKENIZER.decode_spans(spans, content_type="text/plain") == expected
    assert isinstance(TOKENIZER.decode_spans(spans, content_type="image/png")[0], UnsupportedMediaError)


def test_spans_of_another_tokenizer_are_refused() -> None:
    span = TOKENIZER.encode("x")
    other = TokenSpan("text", span.layout, span.codes, "00")
    plugin = TokenSpan("plugin", span.layout, span.codes, TOKENIZER.hash)
    errors = [
        result for result in TOKENIZER.decode_spans([other, plugin]) if isinstance(result, ErnieMultiError)
    ]
    assert [type(error) for error in errors] == [TokenizerMismatchError, UnsupportedMediaError]
    assert TOKENIZER.hash in errors[0].message and "00" in errors[0].message


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 100])
def test_a_file_that_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="SentencePiece"):
        TextTokenizer.load(path)


def test_the_card_describes_the_shipped_model() -> None:
    card = json.loads((WEIGHTS / "text.json").read_text(encoding="utf-8"))
    assert card["hash"] == TOKENIZER.hash
    assert card["vocabulary_size"] == TOKENIZER.vocabulary_size == 8192
    model = (WEIGHTS / "text.model").read_bytes()
    assert TextTokenizer(model).hash == TOKENIZER.hash
    assert len(bytes.fromhex(TOKENIZER.hash)) == 16 and TOKENIZER.hash != hashlib.blake2b(model).hexdigest()
    for measured in card["held_out"].values():
        assert measured["bytes_per_token"] > 2.5
