"""The wire carries every value unchanged and refuses every damaged message."""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ernie5.protocol.errors import InvalidMediaError, WireError
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.wire import (
    MAX_HEAD_BYTES,
    decode_segment,
    decode_sequence,
    decode_span,
    decode_spans,
    encode_segment,
    encode_sequence,
    encode_span,
    encode_spans,
    span_from_json,
    span_to_json,
)

DECODERS = (decode_span, decode_spans, decode_sequence, decode_segment)
SPAN = TokenSpan("text", SequenceLayout(10), np.array([1, 2, 3], np.int32), "ab", metadata={"n": 1})


def sealed(head: bytes, body: bytes, *, version: int = 1, kind: int = 1, lengths: tuple = ()) -> bytes:
    """A message with a right checksum around whatever is inside, as an attacker would send it."""
    head_length, body_length = lengths or (len(head), len(body))
    prefix = struct.pack("<4sBBHIIQ", b"E5TK", version, kind, 0, head_length, 0, body_length)
    return prefix + hashlib.blake2b(prefix + head + body, digest_size=8).digest() + head + body


def sealed_json(value: object, arrays: list, body: bytes, kind: int = 1) -> bytes:
    text = json.dumps({"arrays": arrays, "value": value}, separators=(",", ":"), sort_keys=True).encode()
    return sealed(text.ljust((len(text) + 7) // 8 * 8), body, kind=kind)


def head_of(message: bytes) -> dict:
    length = struct.unpack_from("<I", message, 8)[0]
    return json.loads(message[32 : 32 + length])


@pytest.fixture
def messages(small_spans: list[TokenSpan]) -> dict:
    """Small messages of every kind, by decoder."""
    sequence = TokenSequence("0a", tuple(TokenSegment(span, "target") for span in small_spans[:2]))
    return {
        decode_span: [encode_span(span) for span in small_spans],
        decode_spans: [encode_spans(small_spans[::2]), encode_spans([])],
        decode_sequence: [encode_sequence(sequence)],
        decode_segment: [
            encode_segment(Segment(modality="text", text="猫")),
            encode_segment(Segment(modality="image", data=b"abc", role="target")),
            encode_segment(Segment(modality="image", reference="a/b.png")),
        ],
    }


@given(st.from_type(TokenSpan))
def test_a_span_round_trips(span: TokenSpan) -> None:
    decoded = decode_span(encode_span(span))
    assert decoded == span
    assert decoded.layout == span.layout
    assert encode_span(decoded) == encode_span(span)


@given(st.lists(st.from_type(TokenSpan), max_size=3))
def test_several_spans_round_trip(spans: list[TokenSpan]) -> None:
    assert decode_spans(encode_spans(spans)) == spans


@given(st.from_type(TokenSequence))
def test_a_sequence_round_trips(sequence: TokenSequence) -> None:
    assert decode_sequence(encode_sequence(sequence)) == sequence


@given(st.from_type(Segment))
def test_a_segment_round_trips(segment: Segment) -> None:
    assert decode_segment(encode_segment(segment)) == segment


@given(st.from_type(TokenSpan), st.booleans())
def test_a_span_round_trips_through_json_text(span: TokenSpan, features: bool) -> None:
    decoded = span_from_json(json.loads(json.dumps(span_to_json(span, features))))
    if features:
        assert decoded == span
    else:
        bare = TokenSpan(span.modality, span.layout, span.codes, span.tokenizer, metadata=span.metadata)
        assert decoded == bare


def test_arrays_are_read_in_place(small_spans: list[TokenSpan]) -> None:
    message = encode_span(small_spans[1])
    decoded = decode_span(message)
    held = np.frombuffer(message, np.uint8)
    assert decoded.latent is not None
    for array in (decoded.codes, decoded.features["patches"], decoded.latent):
        assert np.shares_memory(array, held)
        assert array.flags.aligned and not array.flags.writeable


def test_a_mutable_buffer_may_change_afterwards() -> None:
    buffer = bytearray(encode_span(SPAN))
    decoded = decode_span(buffer)
    buffer[:] = bytes(len(buffer))
    assert decoded == SPAN


def test_every_truncation_is_refused(messages: dict) -> None:
    for decode, encoded in messages.items():
        for message in encoded:
            for end in range(len(message)):
                with pytest.raises(WireError):
                    decode(message[:end])


def test_every_flipped_bit_is_refused(messages: dict) -> None:
    for decode, encoded in messages.items():
        for message in encoded:
            damaged = bytearray(message)
            for bit in range(8 * len(message)):
                damaged[bit // 8] ^= 1 << bit % 8
                with pytest.raises(WireError):
                    decode(bytes(damaged))
                damaged[bit // 8] ^= 1 << bit % 8


@given(data=st.data(), span=st.from_type(TokenSpan))
def test_random_damage_is_refused(data: st.DataObject, span: TokenSpan) -> None:
    message = encode_span(span)
    start = data.draw(st.integers(0, len(message) - 1))
    replacement = data.draw(st.binary(min_size=0, max_size=40))
    removed = data.draw(st.integers(0, 40))
    damaged = message[:start] + replacement + message[start + removed :]
    if damaged == message:
        return
    with pytest.raises(WireError):
        decode_span(damaged)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(WireError):
            decode(noise)


@given(st.binary(max_size=120), st.binary(max_size=32), st.integers(1, 4))
def test_noise_with_a_right_checksum_is_refused(head: bytes, body: bytes, kind: int) -> None:
    message = sealed(head.ljust((len(head) + 7) // 8 * 8), body, kind=kind)
    with pytest.raises(WireError):
        DECODERS[kind - 1](message)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(data=st.data())
def test_a_head_with_one_value_replaced_decodes_to_what_it_says_or_is_refused(data: st.DataObject) -> None:
    """A right checksum around a changed head: no crash, and no value that the head doesn't state."""
    message = encode_span(SPAN)
    length = struct.unpack_from("<I", message, 8)[0]
    head, body = head_of(message), message[32 + length :]
    place = data.draw(st.sampled_from(["arrays", *head["value"], "vocabulary_size", "extra"]))
    value = data.draw(json_like)
    if place == "arrays":
        head["arrays"] = value
    elif place == "vocabulary_size":
        head["value"]["layout"][place] = value
    else:
        head["value"][place] = value
    try:
        changed = sealed_json(head["value"], head["arrays"], body)
        decoded = decode_span(changed)
    except (WireError, UnicodeEncodeError):
        return
    assert encode_span(decoded) == changed


def test_each_decoder_refuses_the_other_kinds(messages: dict) -> None:
    for decode in DECODERS:
        for other, encoded in messages.items():
            for message in encoded if other is not decode else ():
                with pytest.raises(WireError, match="expected a"):
                    decode(message)


def test_another_version_is_refused_by_name() -> None:
    message = encode_span(SPAN)
    length = struct.unpack_from("<I", message, 8)[0]
    with pytest.raises(WireError, match="version 2; this program reads version 1"):
        decode_span(sealed(message[32 : 32 + length], message[32 + length :], version=2))


@pytest.mark.parametrize(
    "lengths",
    [(2**32 - 8, 8), (MAX_HEAD_BYTES + 8, 8), (8, 2**64 - 1), (8, 2**40), (0, 0), (8, 0)],
)
def test_declared_lengths_beyond_the_message_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(WireError):
        decode_span(sealed(b"{}      ", bytes(8), lengths=lengths))


@pytest.mark.parametrize(
    "arrays",
    [
        [["i4", [2**62]]],
        [["i4", [2**31, 2**31]]],
        [["i4", [0, 2**62]]],
        [["i4", [-1]]],
        [["i4", [3.0]]],
        [["i4", [True]]],
        [["i4", [1, 1, 1, 3]]],
        [["i4", [3, 1]]],
        [["i4", [2]]],
        [["u4", [3]]],
        [["f2", [6]]],
        [["u1", [12]]],
        [["O", [3]]],
        [["i8", [2]]],
        [["u1", [2**62]]],
        [["i4", [3]], ["i4", [0]]],
        [["i4"]],
        [],
        {},
    ],
)
def test_a_table_of_arrays_that_does_not_fit_is_refused(arrays: object) -> None:
    message = encode_span(SPAN)
    length = struct.unpack_from("<I", message, 8)[0]
    with pytest.raises(WireError):
        decode_span(sealed_json(head_of(message)["value"], arrays, message[32 + length :]))  # type: ignore[arg-type]


def test_codes_beyond_the_vocabulary_are_refused() -> None:
    message = encode_span(SPAN)
    value = head_of(message)["value"]
    for codes in ([1, 2, 10], [1, 2, -1]):
        body = np.array([*codes, 0], "<i4").tobytes()
        with pytest.raises(WireError, match=r"leave the range \[0, 10\)"):
            decode_span(sealed_json(value, [["i4", [3]]], body))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_features_are_refused_on_both_sides(bad: float) -> None:
    features = {"patches": np.full((1, 1, 4), bad, np.float16)}
    span = TokenSpan("text", SPAN.layout, SPAN.codes, "ab", features)
    for encode in (encode_span, lambda s: span_to_json(s, features=True)):
        with pytest.raises(WireError, match=r"features\.patches holds NaN or infinity"):
            encode(span)
    good = encode_span(
        TokenSpan("text", SPAN.layout, SPAN.codes, "ab", {"patches": np.ones((1, 1, 4), np.float16)})
    )
    head = head_of(good)
    body = good[32 + struct.unpack_from("<I", good, 8)[0] :]
    damaged = body.replace(np.ones(4, "<f2").tobytes(), features["patches"].tobytes())
    assert damaged != body
    with pytest.raises(WireError, match="NaN or infinity"):
        decode_span(sealed_json(head["value"], head["arrays"], damaged))


@pytest.mark.parametrize(
    "head",
    [
        b'{"arrays":[],"value":{}} ',
        b'{"value":{},"arrays":[]}',
        b'{"arrays":[], "value":{}}',
        b'{"arrays":[],"arrays":[],"value":{}}',
        b'{"arrays":[],"value":{"a":NaN}}',
        b'{"arrays":[],"value":{"a":"\\ud800"}}',
        b'{"arrays":[],"value":{"a":1e999}}',
        b'{"arrays":[],"value":' + b'{"a":' * 3000 + b"1" + b"}" * 3001,
        b'{"arrays":[],"value":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
    ],
)
def test_a_head_that_is_not_canonical_json_is_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        decode_span(sealed(head.ljust((len(head) + 7) // 8 * 8), b""))


def test_the_limit_of_the_caller_is_kept() -> None:
    message = encode_span(SPAN)
    assert decode_span(message, max_bytes=len(message)) == SPAN
    with pytest.raises(WireError, match=f"above the limit {len(message) - 1}"):
        decode_span(message, max_bytes=len(message) - 1)


def test_a_head_above_its_limit_is_refused_when_written() -> None:
    span = TokenSpan("text", SPAN.layout, SPAN.codes, "ab", metadata={"note": "x" * MAX_HEAD_BYTES})
    with pytest.raises(WireError, match=f"above the limit {MAX_HEAD_BYTES}"):
        encode_span(span)


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        ({"a": float("nan")}, "a"),
        ({"a": [1, {"b": float("inf")}]}, r"a\[1\]\.b"),
        ({"a": {1: 2}}, "a"),
        ({"a": 2**64}, "a"),
        ({"a": b"x"}, "a"),
        ({"a": np.int64(3)}, "a"),
        ({"a": "\ud800"}, "a"),
    ],
)
def test_metadata_that_json_can_not_carry_is_refused_with_its_path(metadata: dict, path: str) -> None:
    span = TokenSpan("text", SPAN.layout, SPAN.codes, "ab", metadata=metadata)
    for encode in (encode_span, span_to_json):
        with pytest.raises(WireError, match=path):
            encode(span)


def test_tuples_in_metadata_travel_as_lists() -> None:
    span = TokenSpan("text", SPAN.layout, SPAN.codes, "ab", metadata={"size": (3, 4)})
    assert decode_span(encode_span(span)).metadata == {"size": [3, 4]}


@pytest.mark.parametrize("data", ["text", None, 3, [1, 2]])
def test_what_is_not_bytes_is_refused(data: object) -> None:
    for decode in DECODERS:
        with pytest.raises(WireError, match="a message is bytes"):
            decode(data)  # type: ignore[arg-type]


def test_text_with_a_lone_surrogate_is_bad_media() -> None:
    with pytest.raises(InvalidMediaError, match="not valid Unicode"):
        encode_segment(Segment(modality="text", text="a\ud800"))


def test_text_payload_that_is_not_utf8_is_refused() -> None:
    value = head_of(encode_segment(Segment(modality="text", text="é")))["value"]
    with pytest.raises(WireError):
        decode_segment(sealed_json(value, [["u1", [2]]], b"\xff\xfe".ljust(8, b"\0"), kind=4))


@settings(max_examples=300)
@given(value=json_like)
def test_json_that_is_no_span_is_refused(value: object) -> None:
    with pytest.raises(WireError):
        span_from_json(value)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"codes": [1, 2, 10]}, "range"),
        ({"codes": [1, 2.0]}, "codes"),
        ({"codes": [True]}, "codes"),
        ({"codes": [2**40]}, "codes"),
        ({"codes": "123"}, "codes"),
        ({"codes": [[1]]}, "codes"),
        ({"layout": {"kind": "tree"}}, r"layout\.kind"),
        ({"layout": {"kind": "sequence", "vocabulary_size": 0}}, "vocabulary_size"),
        ({"layout": {"kind": "sequence", "vocabulary_size": 10, "bits": 3}}, "bits"),
        ({"modality": "image"}, "scales layout"),
        ({"colour": 1}, "colour"),
        ({"features": {"p": {"dtype": "float32", "shape": [1, 1, 1], "data": ""}}}, "dtype"),
        ({"features": {"p": {"dtype": "float16", "shape": [1, 1, 1], "data": "!"}}}, "base64"),
        ({"features": {"p": {"dtype": "float16", "shape": [1, 1, 2**60], "data": "AAA="}}}, "shape"),
        ({"features": {"p": {"dtype": "float16", "shape": [1, 1, 2], "data": "AAA="}}}, "bytes"),
        ({"latent": {"dtype": "float16", "shape": [1, 1, 1], "data": "AHw="}}, "infinity"),
    ],
)
def test_a_json_span_with_one_wrong_field_is_refused_with_its_name(change: dict, path: str) -> None:
    with pytest.raises(WireError, match=path):
        span_from_json({**span_to_json(SPAN), **change})
