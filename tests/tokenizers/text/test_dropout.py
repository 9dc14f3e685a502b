"""BPE-dropout: other cuts of the same text, a function of (seed, position, text) alone."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSpan
from ernie5.tokenizers.text import BpeDropout, TextTokenizer
from ernie5.tokenizers.text.dropout import Merges
from ernie5.tokenizers.text.model_file import ModelFile
from tests.tokenizers.text.models import trained

UTF8 = TextTokenizer.load()
UTF16 = TextTokenizer.load(fallback="utf-16be")
MERGES = Merges(ModelFile.parse(UTF8.model))
TEXT = (
    "In the beginning God created the heaven and the earth. 床前明月光，疑是地上霜。\n    return self.value\n"
)
strings = st.lists(st.sampled_from([*"the  inag", "床", "明月", "㐀", "\n", "é", "😀", " God"])).map("".join)


@given(strings)
def test_without_dropout_the_merges_are_sentencepiece_s(text: str) -> None:
    assert MERGES.ids(text, repeat(False)) == UTF8.ids(text).tolist()


def test_merges_are_sentencepiece_s_on_real_text() -> None:
    assert MERGES.ids(TEXT, repeat(False)) == UTF8.ids(TEXT).tolist()


def test_symbols_that_a_user_defined_are_never_cut() -> None:
    tokenizer = TextTokenizer(trained(user_defined_symbols=["<x>", "<x><y>", "\n"]))
    merges = Merges(ModelFile.parse(tokenizer.model))
    text = "the <x><y> tokenizer <x>\n<x"
    assert merges.ids(text, repeat(False)) == tokenizer.ids(text).tolist()
    assert tokenizer.text(merges.ids(text, repeat(True))) == text


@given(strings, st.floats(0, 1), st.integers(0, 2**64 - 1), st.sampled_from([UTF8, UTF16]))
def test_any_cut_gives_the_text_back_and_comes_again(
    text: str, rate: float, seed: int, tokenizer: TextTokenizer
) -> None:
    dropout = BpeDropout(rate, seed)
    ids = tokenizer.ids(text, dropout=dropout)
    assert tokenizer.text(ids) == text
    assert np.array_equal(ids, tokenizer.ids(text, dropout=BpeDropout(rate, seed)))


def test_draws_are_the_same_on_every_machine() -> None:
    # Fixed for ever: a run that goes on elsewhere has to cut as it did.
    drops = BpeDropout(0.5, seed=7, position=11).drops("cat")
    assert "".join("01"[next(drops)] for _ in range(24)) == "111110010111010000101111"


def test_more_dropout_gives_shorter_pieces() -> None:
    lengths = [len(UTF8.ids(TEXT, dropout=BpeDropout(rate, 1))) for rate in (0, 0.1, 0.5, 1)]
    assert lengths == sorted(lengths) and len(set(lengths)) == 4
    assert lengths[0] == len(UTF8.ids(TEXT))
    characters = [UTF8.text([token]) for token in UTF8.ids("the God", dropout=BpeDropout(1))]
    assert characters == list("the God")


def test_seed_position_and_text_each_change_the_cut() -> None:
    base = BpeDropout(0.3, seed=1, position=1)
    cuts = [UTF8.ids(TEXT, dropout=each).tolist() for each in (base, BpeDropout(0.3, 2, 1), base.at(2))]
    assert cuts[0] != cuts[1] != cuts[2] != cuts[0]
    # The same words in another text are cut otherwise somewhere.
    assert UTF8.ids("x" + TEXT, dropout=base)[1:].tolist() != cuts[0]


def test_the_share_left_out_is_the_rate() -> None:
    drops = BpeDropout(0.1, 3).drops("any")
    assert abs(sum(next(drops) for _ in range(20_000)) / 20_000 - 0.1) < 0.01


def test_segments_are_cut_by_their_positions_whatever_their_batch() -> None:
    segments = [Segment(modality="text", text=TEXT), Segment(modality="code", text=TEXT)] * 2
    dropout = BpeDropout(0.3, seed=5)
    together = UTF8.encode_segments(segments, dropout=dropout, positions=[4, 4, 9, 9])
    for segment, position, span in zip(segments, [4, 4, 9, 9], together, strict=True):
        assert isinstance(span, TokenSpan) and span.tokenizer == UTF8.hash
        assert UTF8.encode_segments([segment], dropout=dropout, positions=[position]) == [span]
        assert UTF8.decode(span) == TEXT
    assert together[0] != together[2]
    plain = UTF8.encode_segments(segments)
    assert plain == UTF8.encode_segments(segments, dropout=BpeDropout(0)) and plain[0] != together[0]


@pytest.mark.parametrize("wrong", [{"rate": -0.1}, {"rate": 1.1}, {"rate": 0.1, "seed": -1}])
def test_impossible_values_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidInputError, match="outside"):
        BpeDropout(**wrong)


def test_a_model_without_merges_has_no_dropout() -> None:
    unigram = TextTokenizer(trained(model_type="unigram", vocab_size=400))
    assert unigram.text(unigram.ids(TEXT)) == TEXT
    with pytest.raises(InvalidInputError, match="a unigram model doesn't have"):
        unigram.ids(TEXT, dropout=BpeDropout(0.1))
