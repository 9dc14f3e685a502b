"""Characters without a piece in UTF-8 or UTF-16BE: exact either way, shorter in the second."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError
from ernie5.protocol.samples import Segment
from ernie5.tokenizers.text import TextTokenizer
from ernie5.tokenizers.text.model_file import Fallback
from ernie5.tokenizers.text.tokenizer import WEIGHTS

UTF8 = TextTokenizer.load()
UTF16 = TextTokenizer.load(fallback="utf-16be")
BOTH = pytest.mark.parametrize("tokenizer", [UTF8, UTF16], ids=lambda tokenizer: tokenizer.fallback)

# All planes, the characters that tokenizers lose, and names of pieces, between one another.
awkward = st.sampled_from(
    [
        *["\u2581", " ", "  ", "\n", "\r\n", "\r", "\t", "\0", "\v", "\f", "\x85", "\u2028", "\u2029"],
        *["\ufeff", "\u200b", "\u200d", "\u0301", "\u2585", "\u3000", "\xa0", "\ufffd", "\uffff", "\ufffe"],
        *["\U0010ffff", "\U0001ffff", "👩\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "e\u0301\u0323"],
        *["\uff21", "\ufb01", "\u212b", "\u1100\u1161", "ก็", "﷽", "\U00020000", "<unk>", "<0x41>", "猫", "7"],
    ]
)
planes = st.builds(
    lambda plane, offset: chr(plane << 16 | offset), st.integers(0, 16), st.integers(0, 0xFFFF)
).filter(lambda character: not 0xD800 <= ord(character) < 0xE000)
strings = st.lists(awkward | planes | st.text(max_size=4)).map("".join)


@BOTH
@given(text=strings)
@example(text="\u2581\0\u2581 \n\r\n\r")
def test_any_string_comes_back_exactly(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.ids(text)
    assert tokenizer.text(ids) == text
    decoder = tokenizer.incremental_decoder()
    shown = ""
    for token in ids:
        shown += decoder.push(int(token))
        assert text.startswith(shown)
    assert decoder.finish() == "" and shown == text


@BOTH
def test_every_character_of_every_plane_comes_back(tokenizer: TextTokenizer) -> None:
    step = 7  # a seventh of all, from every block
    characters = [chr(code) for code in range(0, 0x110000, step) if not 0xD800 <= code < 0xE000]
    text = "".join(characters)
    for start in range(0, len(text), 50_000):
        part = text[start : start + 50_000]
        assert tokenizer.text(tokenizer.ids(part)) == part


@BOTH
@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_forms_of_unicode_stay_what_they_are(tokenizer: TextTokenizer, form: str) -> None:
    text = unicodedata.normalize(form, "Å ﬁ ½ 한국어 が ﷺ ①")
    assert tokenizer.text(tokenizer.ids(text)) == text


@pytest.mark.parametrize(
    ("text", "utf8", "utf16"),
    [("㐀", 3, 2), ("\U0001f9ff", 4, 4), ("ق", 2, 2), ("\u2581", 3, 2), ("\n", 1, 2)],
)
def test_tokens_of_a_character_without_a_piece(text: str, utf8: int, utf16: int) -> None:
    assert (len(UTF8.ids(text)), len(UTF16.ids(text))) == (utf8, utf16)


def test_characters_with_pieces_have_the_same_ids() -> None:
    text = "    return x  # 床前明月光"
    assert np.array_equal(UTF8.ids(text), UTF16.ids(text))


@given(ids=st.lists(st.integers(0, 8191) | st.integers(1, 256)), data=st.data())
def test_streams_of_any_ids_equal_their_text_at_once(ids: list[int], data: st.DataObject) -> None:
    decoder = UTF16.incremental_decoder()
    shown, start = "", 0
    while start < len(ids):
        size = data.draw(st.integers(1, 4))
        shown += decoder.push(ids[start : start + size])
        start += size
    text = UTF16.text(ids)
    assert shown + decoder.finish() == text
    text.encode()  # no lone surrogate


def test_half_a_character_before_a_piece_is_lost_alone() -> None:
    cat, rare = UTF16.ids("猫"), UTF16.ids("㐀")
    assert UTF16.text([*rare[:1], *cat, *rare]) == "\ufffd猫㐀"
    pair = UTF16.ids("\U0001f9ff")
    assert UTF16.text([*pair[:2], *cat]) == "\ufffd猫"
    assert UTF16.text([*pair[2:], *cat])[-1] == "猫"


def test_the_encoding_is_part_of_the_hash_and_of_the_file() -> None:
    assert UTF8.hash != UTF16.hash
    assert TextTokenizer(UTF16.model).hash == UTF16.hash and TextTokenizer(UTF16.model).fallback == "utf-16be"
    assert UTF8.model == (WEIGHTS / "text.model").read_bytes()
    back = TextTokenizer(UTF16.model, fallback="utf-8")
    assert back.hash == UTF8.hash


@BOTH
@pytest.mark.parametrize("data", [b"\xff", b"\xc0\x80", b"\xe2\x96", b"a\xed\xa0\x80b", b"\xf4\x90\x80\x80"])
def test_bytes_that_are_no_utf8_are_refused(tokenizer: TextTokenizer, data: bytes) -> None:
    (result,) = tokenizer.encode_segments([Segment(modality="text", data=data)])
    assert isinstance(result, InvalidMediaError) and "at byte" in result.message


@BOTH
def test_a_lone_surrogate_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InvalidMediaError, match="lone surrogate U"):
        tokenizer.ids("a\ud800")


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"utf-7.*known are utf-8, utf-16be"):
        TextTokenizer(UTF8.model, fallback="utf-7")  # type: ignore[arg-type]


@pytest.mark.parametrize("fallback", [None, "utf-8", "utf-16be"])
def test_a_file_that_is_no_model_is_refused_in_any_encoding(fallback: Fallback | None) -> None:
    for data in (b"x", b"\n\xff\xff", b"not a model"):
        with pytest.raises(InvalidInputError, match="not a SentencePiece model"):
            TextTokenizer(data, fallback=fallback)
