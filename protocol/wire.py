"""The wire format of token spans, sequences and media segments.

One message, all integers little-endian::

    0   4  magic "E5TK"
    4   1  version (1)
    5   1  kind (1 span, 2 spans, 3 sequence, 4 segment)
    6   2  reserved, zero
    8   4  head length in bytes
    12  4  reserved, zero
    16  8  body length in bytes
    24  8  checksum: BLAKE2b-64 over bytes 0..24, head and body
    32     head: canonical JSON {"arrays": [[dtype, shape], ...], "value": {...}}, padded with spaces to 8
           body: the arrays one after another, raw, each padded with zeros to 8 bytes

The checksum finds damage; it is no signature. Decoding never trusts a declared size: every length is compared
with the bytes at hand before anything is made, arrays are read-only views into the message, and whatever is
wrong raises :class:`~ernie5.protocol.errors.WireError`. Only canonical heads are read, so equal values have
equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ernie5.protocol.errors import InvalidMediaError, WireError
from ernie5.protocol.samples import Segment
from ernie5.protocol.spans_json import (
    CODE_DTYPES,
    check_finite,
    checked_shape,
    layout_from_json,
    layout_to_json,
    plain_json,
    read_fields,
    span_from_json,
    span_to_json,
)
from ernie5.protocol.tokens import TokenSegment, TokenSequence, TokenSpan

__all__ = [
    "MAX_HEAD_BYTES",
    "MAX_MESSAGE_BYTES",
    "TOKENS_CONTENT_TYPE",
    "decode_segment",
    "decode_sequence",
    "decode_span",
    "decode_spans",
    "encode_segment",
    "encode_sequence",
    "encode_span",
    "encode_spans",
    "span_from_json",
    "span_to_json",
]

TOKENS_CONTENT_TYPE = "application/x-ernie5-tokens"
MAGIC = b"E5TK"
VERSION = 1
MAX_MESSAGE_BYTES = 1 << 28
MAX_HEAD_BYTES = 1 << 20

_KINDS = {"span": 1, "spans": 2, "sequence": 3, "segment": 4}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}
_PREFIX = struct.Struct("<4sBBHIIQ")
_CHECKSUM_BYTES = 8
_START = _PREFIX.size + _CHECKSUM_BYTES
_DTYPES = {"i4": np.int32, "u4": np.uint32, "i2": np.int16, "f2": np.float16, "u1": np.uint8}
_DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}

Bytes = bytes | bytearray | memoryview


def encode_span(span: TokenSpan) -> bytes:
    """One span as a message.

    Raises:
        WireError: metadata that JSON can't carry, non-finite features, or a message above the limits.
    """
    arrays: list[np.ndarray] = []
    return _pack("span", _span_head(span, arrays), arrays)


def decode_span(data: Bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> TokenSpan:
    """The span of a message of kind ``span``; its arrays are read-only views into ``data``.

    Raises:
        WireError: the message is damaged, of another kind or version, or above ``max_bytes``.
    """
    value, arrays = _unpack("span", data, max_bytes)
    span = _read_span(value, arrays, "span")
    arrays.finish()
    return span


def encode_spans(spans: Sequence[TokenSpan]) -> bytes:
    """Several spans as one message (the answer to a batch); raises as :func:`encode_span`."""
    arrays: list[np.ndarray] = []
    return _pack("spans", {"spans": [_span_head(span, arrays) for span in spans]}, arrays)


def decode_spans(data: Bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> list[TokenSpan]:
    """The spans of a message of kind ``spans``; raises as :func:`decode_span`."""
    value, arrays = _unpack("spans", data, max_bytes)
    heads = read_fields(value, "spans", {"spans": list})["spans"]
    spans = [_read_span(head, arrays, f"spans[{index}]") for index, head in enumerate(heads)]
    arrays.finish()
    return spans


def encode_sequence(sequence: TokenSequence) -> bytes:
    """All spans of a sample with their roles; raises as :func:`encode_span`."""
    arrays: list[np.ndarray] = []
    segments = [
        {"role": segment.role, "span": _span_head(segment.span, arrays)} for segment in sequence.segments
    ]
    head = {"sample_id": sequence.sample_id, "segments": segments, "metadata": sequence.metadata}
    return _pack("sequence", head, arrays)


def decode_sequence(data: Bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> TokenSequence:
    """The sequence of a message of kind ``sequence``; raises as :func:`decode_span`."""
    value, arrays = _unpack("sequence", data, max_bytes)
    fields = read_fields(value, "sequence", {"sample_id": str, "segments": list, "metadata": dict})
    segments = []
    for index, head in enumerate(fields["segments"]):
        where = f"sequence.segments[{index}]"
        segment = read_fields(head, where, {"role": str, "span": dict})
        if segment["role"] not in ("context", "target"):
            raise WireError(f"{where}.role is {segment['role']!r}; known: context, target", param=where)
        segments.append(TokenSegment(_read_span(segment["span"], arrays, f"{where}.span"), segment["role"]))
    arrays.finish()
    return TokenSequence(fields["sample_id"], tuple(segments), fields["metadata"])


def encode_segment(segment: Segment) -> bytes:
    """A medium still to be tokenised, as the work streams carry it.

    Raises:
        InvalidMediaError: text that is not valid Unicode.
        WireError: metadata that JSON can't carry, or a message above the limits.
    """
    payload, arrays = "reference", []
    if segment.reference is None:
        payload = "data" if segment.data is not None else "text"
        try:
            arrays = [np.frombuffer(segment.payload, np.uint8)]
        except UnicodeEncodeError as error:
            raise InvalidMediaError(
                f"text is not valid Unicode: {error.reason} at {error.start}", param="text"
            ) from None
    head = {
        "modality": segment.modality,
        "role": segment.role,
        "payload": payload,
        "reference": segment.reference,
        "content_type": segment.content_type,
        "metadata": segment.metadata,
    }
    return _pack("segment", head, arrays)


def decode_segment(data: Bytes, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Segment:
    """The segment of a message of kind ``segment``; raises as :func:`decode_span`."""
    value, arrays = _unpack("segment", data, max_bytes)
    optional = (str, type(None))
    fields = read_fields(
        value,
        "segment",
        {
            "modality": str,
            "role": str,
            "payload": str,
            "reference": optional,
            "content_type": optional,
            "metadata": dict,
        },
    )
    payload = fields.pop("payload")
    if payload not in ("text", "data", "reference"):
        raise WireError(f"segment.payload is {payload!r}; known: text, data, reference")
    try:
        if payload != "reference":
            media = arrays.take("u1", "segment.payload").tobytes()
            fields[payload] = media.decode() if payload == "text" else media
        segment = Segment(**fields)
    except ValueError as error:
        raise error if isinstance(error, WireError) else WireError(f"segment: {error}") from None
    arrays.finish()
    return segment


class _Arrays:
    """The arrays of a message, taken in the order in which they were written."""

    def __init__(self, data: bytes, start: int, table: Any) -> None:
        if type(table) is not list:
            raise WireError("head.arrays must be a list")
        self._taken = 0
        self._arrays: list[tuple[str, np.ndarray]] = []
        position = start
        for index, entry in enumerate(table):
            where = f"head.arrays[{index}]"
            if type(entry) is not list or len(entry) != 2 or type(entry[0]) is not str:
                raise WireError(f"{where} must be [dtype, shape]")
            name = entry[0]
            if name not in _DTYPES:
                raise WireError(f"{where} has dtype {name!r}; known: {', '.join(_DTYPES)}")
            # Media bytes may be longer than any array of codes; the message's size bounds them.
            shape = _byte_shape(entry[1], where) if name == "u1" else checked_shape(entry[1], where)
            stored = np.dtype(_DTYPES[name]).newbyteorder("<")
            count = math.prod(shape)
            size = count * stored.itemsize
            end = position + _padded(size)
            if end > len(data):
                raise WireError(f"{where} needs {end - position} bytes, {len(data) - position} are left")
            if any(data[position + size : end]):
                raise WireError(f"{where} has padding that is not zero")
            array = np.frombuffer(data, stored, count, position) if count else np.empty(0, stored)
            self._arrays.append((name, array.reshape(shape).astype(_DTYPES[name], copy=False)))
            position = end
        if position != len(data):
            raise WireError(f"{len(data) - position} bytes of the body belong to no array")

    def take(self, dtype: str, where: str) -> np.ndarray:
        if self._taken == len(self._arrays):
            raise WireError(f"{where} lacks its array", param=where)
        name, array = self._arrays[self._taken]
        if name != dtype:
            raise WireError(f"{where} must be of dtype {dtype}, got {name}", param=where)
        self._taken += 1
        return array

    def finish(self) -> None:
        if self._taken != len(self._arrays):
            raise WireError(f"{len(self._arrays) - self._taken} arrays belong to nothing")


def _byte_shape(value: Any, where: str) -> tuple[int, ...]:
    if type(value) is not list or len(value) != 1 or type(value[0]) is not int or value[0] < 0:
        raise WireError(f"{where} must have one size that is not negative")
    return (value[0],)


def _span_head(span: TokenSpan, arrays: list[np.ndarray]) -> dict[str, Any]:
    arrays.append(span.codes)
    names = sorted(span.features)
    for name in names:
        check_finite(span.features[name], f"features.{name}")
        arrays.append(span.features[name])
    if span.latent is not None:
        check_finite(span.latent, "latent")
        arrays.append(span.latent)
    return {
        "modality": span.modality,
        "layout": layout_to_json(span.layout),
        "tokenizer": span.tokenizer,
        "features": names,
        "latent": span.latent is not None,
        "metadata": span.metadata,
    }


def _read_span(value: Any, arrays: _Arrays, where: str) -> TokenSpan:
    fields = read_fields(
        value,
        where,
        {
            "modality": str,
            "layout": dict,
            "tokenizer": str,
            "features": list,
            "latent": bool,
            "metadata": dict,
        },
    )
    layout = layout_from_json(fields["layout"], f"{where}.layout")
    if _canonical(layout_to_json(layout)) != _canonical(fields["layout"]):
        raise WireError(f"{where}.layout is not in its canonical form", param=f"{where}.layout")
    codes = arrays.take(_DTYPE_NAMES[CODE_DTYPES[layout.kind]], f"{where}.codes")
    features: dict[str, np.ndarray] = {}
    names = fields["features"]
    if not all(type(name) is str for name in names) or names != sorted(set(names)):
        raise WireError(f"{where}.features must list distinct names in order", param=f"{where}.features")
    for name in names:
        features[name] = arrays.take("f2", f"{where}.features.{name}")
        check_finite(features[name], f"{where}.features.{name}")
    latent = arrays.take("f2", f"{where}.latent") if fields["latent"] else None
    if latent is not None:
        check_finite(latent, f"{where}.latent")
    try:
        return TokenSpan(
            fields["modality"], layout, codes, fields["tokenizer"], features, latent, fields["metadata"]
        )
    except ValueError as error:
        raise WireError(f"{where}: {error}", param=where) from None


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8


def _checksum(*parts: Bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _pack(kind: str, value: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    table = [[_DTYPE_NAMES[array.dtype], list(array.shape)] for array in arrays]
    head = _canonical({"arrays": table, "value": plain_json(value, kind)})
    head = head.ljust(_padded(len(head)))
    if len(head) > MAX_HEAD_BYTES:
        raise WireError(f"{kind} has a head of {len(head)} bytes, above the limit {MAX_HEAD_BYTES}")
    length = sum(_padded(array.nbytes) for array in arrays)
    if _START + len(head) + length > MAX_MESSAGE_BYTES:
        raise WireError(
            f"{kind} needs {_START + len(head) + length} bytes, above the limit {MAX_MESSAGE_BYTES}"
        )
    prefix = _PREFIX.pack(MAGIC, VERSION, _KINDS[kind], 0, len(head), 0, length)
    chunks: list[bytes] = [head]
    for array in arrays:
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        chunks += [raw, bytes(_padded(len(raw)) - len(raw))]
    return b"".join([prefix, _checksum(prefix, *chunks), *chunks])


def _unpack(kind: str, data: Bytes, max_bytes: int) -> tuple[Any, _Arrays]:
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise WireError(f"a message is bytes, got {type(data).__name__}")
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > max_bytes:
        raise WireError(f"message of {size} bytes is above the limit {max_bytes}")
    # A mutable buffer is copied: spans are immutable, so nobody may change what they look into.
    data = bytes(data)
    if size < _START:
        raise WireError(f"message of {size} bytes is shorter than its prefix of {_START}")
    magic, version, number, reserved, head_length, reserved_too, body_length = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"message starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"message has version {version}; this program reads version {VERSION}")
    if number != _KINDS[kind]:
        raise WireError(f"message holds a {_KIND_NAMES.get(number, number)}, expected a {kind}")
    if reserved or reserved_too:
        raise WireError("message has reserved bytes that are not zero")
    if head_length > MAX_HEAD_BYTES or head_length % 8:
        raise WireError(f"head of {head_length} bytes is above {MAX_HEAD_BYTES} or not a multiple of 8")
    if _START + head_length + body_length != size:
        raise WireError(f"message has {size} bytes, its prefix says {_START + head_length + body_length}")
    view = memoryview(data)
    if _checksum(view[: _PREFIX.size], view[_START:]) != data[_PREFIX.size : _START]:
        raise WireError("message is damaged: its checksum does not match")
    head = data[_START : _START + head_length]
    try:
        parsed = json.loads(head)
        canonical = _canonical(parsed)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message has a head that is not JSON: {type(error).__name__}") from None
    if head != canonical.ljust(_padded(len(canonical))):
        raise WireError("message has a head that is not canonical JSON")
    fields = read_fields(parsed, "head", {"arrays": list, "value": dict})
    plain_json(fields["value"], kind)
    return fields["value"], _Arrays(data, _START + head_length, fields["arrays"])
