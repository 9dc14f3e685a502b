"""Content identity follows the media and their order, never roles or metadata."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ernie5.protocol.samples import Sample, Segment


def flipped(segment: Segment) -> Segment:
    """The same medium with another role and other metadata."""
    role = "target" if segment.role == "context" else "context"
    return segment.model_copy(update={"role": role, "metadata": {"other": 1}})


@given(st.from_type(Sample))
def test_roles_and_metadata_do_not_change_the_identity(sample: Sample) -> None:
    other = Sample(
        segments=tuple(flipped(segment) for segment in sample.segments), metadata={"split": "test"}
    )
    assert other.sample_id == sample.sample_id
    assert len(sample.sample_id) == 32 and int(sample.sample_id, 16) >= 0


@given(st.from_type(Sample), st.from_type(Sample))
def test_the_identity_is_that_of_the_media_in_order(left: Sample, right: Sample) -> None:
    silent = (None, "", "application/octet-stream", "text/plain")
    media = [
        [
            (
                segment.modality,
                None if segment.content_type in silent else segment.content_type,
                segment.payload,
            )
            for segment in sample.segments
        ]
        for sample in (left, right)
    ]
    assert (left.sample_id == right.sample_id) == (media[0] == media[1])


def test_order_and_grouping_of_media_count() -> None:
    a, b = Segment(modality="text", text="a"), Segment(modality="text", text="b")
    both = Segment(modality="text", text="ab")
    identities = {Sample(segments=segments).sample_id for segments in [(a, b), (b, a), (both,), (a,), (a, a)]}
    assert len(identities) == 5


def test_the_modality_is_part_of_the_content() -> None:
    text, code = Segment(modality="text", text="x"), Segment(modality="code", text="x")
    assert text.media_hash != code.media_hash


def test_a_table_s_bytes_as_csv_and_as_tsv_are_different_content() -> None:
    csv, tsv = (
        Segment(modality="table", data=b"a\tb,c\n1\t2,3\n", content_type=f"text/{kind}")
        for kind in ("csv", "tab-separated-values")
    )
    assert csv.media_hash != tsv.media_hash
    assert csv.model_copy(update={"content_type": "Text/CSV; header=present"}).media_hash == csv.media_hash


@pytest.mark.parametrize("content_type", ["", "application/octet-stream", "text/plain; charset=utf-8"])
def test_a_type_that_says_nothing_changes_nothing(content_type: str) -> None:
    plain = Segment(modality="text", text="x")
    assert plain.model_copy(update={"content_type": content_type}).media_hash == plain.media_hash


def test_text_and_its_bytes_are_the_same_content() -> None:
    assert (
        Segment(modality="text", text="é").media_hash
        == Segment(modality="text", data="é".encode()).media_hash
    )


@pytest.mark.parametrize(
    "payloads",
    [{}, {"text": "a", "data": b"a"}, {"text": "a", "reference": "b"}, {"data": b"", "reference": ""}],
)
def test_a_segment_carries_exactly_one_payload(payloads: dict) -> None:
    with pytest.raises(ValueError, match="exactly one of text, data and reference"):
        Segment(modality="text", **payloads)


def test_empty_payloads_are_payloads() -> None:
    assert Segment(modality="text", text="").payload == b""
    assert Segment(modality="image", data=b"").payload == b""


def test_a_reference_has_no_payload_before_it_is_read() -> None:
    with pytest.raises(ValueError, match=r"'a/b\.png', which has not been read"):
        _ = Segment(modality="image", reference="a/b.png").payload


def test_a_lone_surrogate_has_no_payload() -> None:
    with pytest.raises(ValueError):
        _ = Segment(modality="text", text="\ud800").payload


@pytest.mark.parametrize("modality", ["", "two words", "a-b", "1st"])
def test_a_plugin_modality_is_an_identifier(modality: str) -> None:
    with pytest.raises(ValueError, match="identifier"):
        Segment(modality=modality, text="x")


def test_segments_and_samples_are_frozen_and_closed() -> None:
    segment = Segment(modality="text", text="x")
    with pytest.raises(ValidationError):
        segment.text = "y"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Segment(modality="text", text="x", colour="red")  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        Sample(segments=())
