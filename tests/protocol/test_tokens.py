"""Spans hold only what their layout allows; sequences join them with the right markers."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ernie5.protocol.modalities import MODALITIES, modality_of
from ernie5.protocol.tokens import (
    MAX_CODES,
    CodebooksLayout,
    ResizePad,
    ScalesLayout,
    SequenceLayout,
    TokenSegment,
    TokenSequence,
    TokenSpan,
)
from ernie5.protocol.vocabulary import UnifiedVocabulary

VOCABULARY = UnifiedVocabulary(100)
IMAGE = ScalesLayout(4, ((1, 1), (2, 2), (4, 4)))


def text_span(*codes: int) -> TokenSpan:
    return TokenSpan("text", SequenceLayout(100), np.array(codes, np.int32), "t")


def image_span() -> TokenSpan:
    return TokenSpan("image", IMAGE, np.zeros(IMAGE.cells_per_frame, np.uint32), "i")


def speech_span() -> TokenSpan:
    return TokenSpan("speech", CodebooksLayout(8, 2, 12.5, 16000.0, 2560), np.zeros((2, 2), np.int16), "s")


def described(sequence: TokenSequence) -> list[tuple[str, bool]]:
    """Markers by name and spans by modality, each with its target flag."""
    return [
        (
            event.modality.upper() if isinstance(event, TokenSpan) else str(VOCABULARY.marker_name(event)),
            target,
        )
        for event, target in sequence.events(VOCABULARY)
    ]


@given(st.from_type(TokenSpan))
def test_arrays_of_a_span_are_frozen(span: TokenSpan) -> None:
    for array in (span.codes, *span.features.values(), span.latent):
        if array is not None:
            assert not array.flags.writeable
    with pytest.raises(dataclasses.FrozenInstanceError):
        span.modality = "text"  # type: ignore[misc]


@given(st.from_type(TokenSpan), st.data())
def test_one_code_out_of_range_is_refused(span: TokenSpan, data: st.DataObject) -> None:
    if span.codes.size == 0:
        return
    codes = span.codes.copy()
    layout = span.layout
    if isinstance(layout, ScalesLayout):
        if layout.bits == 32:
            return  # every uint32 is a code
        bad = data.draw(st.integers(1 << layout.bits, 2**32 - 1))
    else:
        limit = layout.vocabulary_size if isinstance(layout, SequenceLayout) else layout.codebook_size
        info = np.iinfo(codes.dtype)
        below = st.integers(info.min, -1)
        bad = data.draw(below | st.integers(limit, info.max) if limit <= info.max else below)
    codes.flat[data.draw(st.integers(0, codes.size - 1))] = bad
    with pytest.raises(ValueError, match="leave the range"):
        dataclasses.replace(span, codes=codes)


@given(st.from_type(TokenSpan))
def test_another_dtype_or_rank_is_refused(span: TokenSpan) -> None:
    for codes in (span.codes.astype(np.int64), span.codes.astype(np.float32), span.codes[None]):
        with pytest.raises(ValueError, match="codes must be"):
            dataclasses.replace(span, codes=codes)


@given(st.from_type(TokenSpan), st.from_type(TokenSpan))
def test_equality_is_by_value(left: TokenSpan, right: TokenSpan) -> None:
    copy = dataclasses.replace(left, codes=left.codes.copy())
    assert copy == left
    if left.codes.size:
        changed = left.codes.copy()
        changed.flat[0] = 0 if changed.flat[0] else changed.flat[0]
        assert (dataclasses.replace(left, codes=changed) == left) == (
            changed.tobytes() == left.codes.tobytes()
        )
    if (left.modality, left.layout, left.tokenizer) != (right.modality, right.layout, right.tokenizer):
        assert left != right


@given(st.from_type(ScalesLayout), st.integers(-2, 2))
def test_scales_need_exactly_their_cells(layout: ScalesLayout, off: int) -> None:
    count = layout.frames * sum(height * width for height, width in layout.schedule)
    codes = np.zeros(max(0, count + off), np.uint32)
    if len(codes) == count:
        assert len(TokenSpan("image", layout, codes, "i")) == count
    else:
        with pytest.raises(ValueError, match="do not fill"):
            TokenSpan("image", layout, codes, "i")


@given(st.from_type(CodebooksLayout), st.integers(1, 17))
def test_codebooks_need_exactly_their_levels(layout: CodebooksLayout, levels: int) -> None:
    codes = np.zeros((3, levels), np.int16)
    if levels == layout.levels:
        assert len(TokenSpan("speech", layout, codes, "s")) == 3
    else:
        with pytest.raises(ValueError, match="levels"):
            TokenSpan("speech", layout, codes, "s")


@given(st.from_type(ResizePad))
def test_a_transform_stays_on_its_canvas(transform: ResizePad) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        dataclasses.replace(transform, top=transform.canvas_height - transform.height + 1)
    with pytest.raises(ValueError, match="negative"):
        dataclasses.replace(transform, left=-1)
    with pytest.raises(ValueError, match="empty"):
        dataclasses.replace(transform, width=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SequenceLayout(0),
        lambda: SequenceLayout(2**31),
        lambda: ScalesLayout(0, ((1, 1),)),
        lambda: ScalesLayout(33, ((1, 1),)),
        lambda: ScalesLayout(4, ()),
        lambda: ScalesLayout(4, ((1, 0),)),
        lambda: ScalesLayout(4, ((1, 1),), frames=0),
        lambda: ScalesLayout(4, ((4096, 4097),)),
        lambda: ScalesLayout(4, ((1, 1),), frames=MAX_CODES + 1),
        lambda: CodebooksLayout(0, 1, 12.5, 16000, 0),
        lambda: CodebooksLayout(2**15 + 1, 1, 12.5, 16000, 0),
        lambda: CodebooksLayout(8, 0, 12.5, 16000, 0),
        lambda: CodebooksLayout(8, 1, float("nan"), 16000, 0),
        lambda: CodebooksLayout(8, 1, 12.5, float("inf"), 0),
        lambda: CodebooksLayout(8, 1, 12.5, 0, 0),
        lambda: CodebooksLayout(8, 1, 12.5, 16000, -1),
        lambda: CodebooksLayout(8, 1, 12.5, 16000, 0, channels=0),
    ],
)
def test_impossible_layouts_are_refused(make) -> None:
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize("name", MODALITIES)
def test_a_known_modality_has_one_layout(name: str) -> None:
    spans = {"sequence": text_span(1), "scales": image_span(), "codebooks": speech_span()}
    for kind, span in spans.items():
        if kind == modality_of(name).layout:
            assert dataclasses.replace(span, modality=name).modality == name
        else:
            with pytest.raises(ValueError, match="layout"):
                dataclasses.replace(span, modality=name)


def test_an_unknown_modality_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown modality 'smell'; known: text, code, image"):
        modality_of("smell")


def test_features_and_latent_are_half_precision_of_rank_three() -> None:
    for features in ({"p": np.zeros((1, 4, 2), np.float32)}, {"p": np.zeros((4, 2), np.float16)}):
        with pytest.raises(ValueError, match=r"features\['p'\]"):
            dataclasses.replace(image_span(), features=features)
    with pytest.raises(ValueError, match="latent"):
        dataclasses.replace(image_span(), latent=np.zeros((4, 4), np.float16))


def test_events_of_a_question_about_a_picture() -> None:
    """The markers of a generated run are targets, all but the role marker that opens it."""
    sequence = TokenSequence(
        "x",
        (
            TokenSegment(image_span(), "context"),
            TokenSegment(text_span(1), "context"),
            TokenSegment(text_span(2), "target"),
        ),
    )
    assert described(sequence) == [
        ("begin_sample", False),
        ("context", False),
        ("begin_image", False),
        ("IMAGE", False),
        ("end_image", False),
        ("TEXT", False),
        ("target", False),
        ("TEXT", True),
        ("end_turn", True),
    ]


def test_events_of_generated_media_and_neighbouring_texts() -> None:
    sequence = TokenSequence(
        "x",
        (
            TokenSegment(text_span(1), "context"),
            TokenSegment(text_span(2), "context"),
            TokenSegment(image_span(), "target"),
            TokenSegment(speech_span(), "target"),
            TokenSegment(text_span(3), "context"),
        ),
    )
    assert described(sequence) == [
        ("begin_sample", False),
        ("context", False),
        ("TEXT", False),
        ("separator", False),
        ("TEXT", False),
        ("target", False),
        ("begin_image", True),
        ("grid_4x4", True),
        ("IMAGE", True),
        ("end_image", True),
        ("begin_speech", True),
        ("SPEECH", True),
        ("end_speech", True),
        ("end_turn", True),
        ("context", False),
        ("TEXT", False),
    ]


@given(
    st.lists(st.tuples(st.sampled_from(["text", "image", "speech"]), st.sampled_from(["context", "target"])))
)
def test_events_keep_spans_in_order_and_only_targets_carry_loss(plan: list[tuple[str, str]]) -> None:
    make = {"text": text_span, "image": image_span, "speech": speech_span}
    segments = tuple(TokenSegment(make[modality](), role) for modality, role in plan)  # type: ignore[arg-type]
    events = list(TokenSequence("x", segments).events(VOCABULARY))
    spans = [(event, target) for event, target in events if isinstance(event, TokenSpan)]
    assert [id(span) for span, _ in spans] == [id(segment.span) for segment in segments]
    assert [target for _, target in spans] == [segment.role == "target" for segment in segments]
    ends = [target for event, target in events if event == VOCABULARY.marker("end_turn")]
    roles = [role for _, role in plan]
    runs = sum(role == "target" and previous != "target" for previous, role in zip([None, *roles], roles))
    assert ends == [True] * runs
    # Spans of one sequence layout never touch: otherwise two texts would read as one.
    kinds = ["span" if isinstance(event, TokenSpan) else "marker" for event, _ in events]
    assert ("span", "span") not in set(itertools.pairwise(kinds))
