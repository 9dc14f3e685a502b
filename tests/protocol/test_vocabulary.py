"""Marker ids are distinct, beyond the text, and stay where they are when groups grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie5.protocol.grids import GRIDS
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.vocabulary import MARKER_SLOTS, MARKERS, UnifiedVocabulary


@given(st.integers(1, 2**20))
def test_every_id_is_text_a_marker_or_reserved(text_size: int) -> None:
    vocabulary = UnifiedVocabulary(text_size)
    ids = [vocabulary.marker(name) for name in MARKERS]
    assert len(set(ids)) == len(MARKERS)
    assert all(text_size <= token < vocabulary.size for token in ids)
    assert vocabulary.size == text_size + MARKER_SLOTS
    assert [vocabulary.marker_name(token) for token in ids] == list(MARKERS)
    assert not any(vocabulary.is_text(token) for token in ids)


@given(st.integers(1, 2**20), st.data())
def test_text_ids_have_no_marker_name(text_size: int, data: st.DataObject) -> None:
    vocabulary = UnifiedVocabulary(text_size)
    token = data.draw(st.integers(0, text_size - 1))
    assert vocabulary.is_text(token) and vocabulary.marker_name(token) is None
    assert not vocabulary.is_text(-1) and vocabulary.marker_name(-1) is None
    assert vocabulary.marker_name(vocabulary.size) is None


def test_every_modality_and_grid_has_its_markers() -> None:
    for name in MODALITIES:
        assert {f"begin_{name}", f"end_{name}"} <= MARKERS.keys()
    for height, width in GRIDS:
        assert f"grid_{height}x{width}" in MARKERS


def test_ids_of_shipped_models_do_not_move() -> None:
    """Checkpoints store embeddings by id: these slots are for ever."""
    expected = {
        "pad": 0,
        "begin_sample": 1,
        "context": 2,
        "target": 3,
        "end_turn": 4,
        "separator": 5,
        "begin_text": 16,
        "begin_image": 20,
        "end_image": 21,
        "begin_speech": 24,
        "end_speech": 25,
        "grid_4x4": 96,
        "grid_8x8": 98,
        "grid_16x16": 110,
    }
    assert {name: MARKERS[name] for name in expected} == expected


def test_an_unknown_marker_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown marker 'begin_smell'; known: pad, begin_sample"):
        UnifiedVocabulary(10).marker("begin_smell")
