"""What a SentencePiece file says of itself, read and rewritten without the protocol-buffers package.

Field numbers are those of ``sentencepiece_model.proto``. A file of this project may carry one more field, in
the range that the format leaves to extensions: the encoding of characters that have no piece. SentencePiece
skips it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

from ernie5.protocol.errors import InvalidInputError

Fallback = Literal["utf-8", "utf-16be"]
FALLBACKS: tuple[Fallback, ...] = get_args(Fallback)

_PIECES, _TRAINER, _NORMALISER, _SELF_TEST, _FALLBACK = 1, 2, 3, 4, 1610
_MODEL_TYPE, _WHITESPACE_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_NAME, _CHARACTER_MAP, _DUMMY_PREFIX, _EXTRA_WHITESPACE, _ESCAPE_WHITESPACE = 1, 2, 3, 4, 5
_BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")
_ALGORITHMS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}

Field = tuple[int, int | bytes]


class PieceType(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece as the file has it: a space is U+2581, a byte ``<0x41>``."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A SentencePiece model's description.

    Attributes:
        algorithm: ``unigram``, ``bpe``, ``word`` or ``char``.
        byte_fallback: characters without a piece become bytes, not ``<unk>``.
        normaliser: the name of the rules, such as ``identity`` or ``nmt_nfkc``.
        maps_characters: the rules change characters.
        fallback: the encoding of characters without a piece.
    """

    pieces: tuple[Piece, ...]
    algorithm: str
    byte_fallback: bool
    normaliser: str
    maps_characters: bool
    adds_prefix: bool
    removes_whitespace: bool
    escapes_whitespace: bool
    whitespace_suffix: bool
    fallback: Fallback

    @classmethod
    def parse(cls, data: bytes) -> ModelFile:
        """The description of a file's content; ``InvalidInputError`` where it is no SentencePiece file."""
        try:
            fields = list(_fields(data))
            pieces = tuple(_piece(_bytes(value)) for number, value in fields if number == _PIECES)
            trainer = dict(_fields(_bytes(_last(fields, _TRAINER, b""))))
            normaliser = dict(_fields(_bytes(_last(fields, _NORMALISER, b""))))
            fallback = _bytes(_last(fields, _FALLBACK, FALLBACKS[0].encode())).decode()
            name = _bytes(normaliser.get(_NAME, b"")).decode()
        except (ValueError, struct.error) as error:
            raise InvalidInputError(f"not a SentencePiece model: {error}", param="model") from None
        if not pieces:
            raise InvalidInputError("not a SentencePiece model: it holds no pieces", param="model")
        model_type = trainer.get(_MODEL_TYPE, 1)
        return cls(
            pieces=pieces,
            algorithm=_ALGORITHMS.get(model_type, "unknown") if isinstance(model_type, int) else "unknown",
            byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
            normaliser=name,
            maps_characters=bool(normaliser.get(_CHARACTER_MAP, b"")),
            adds_prefix=bool(normaliser.get(_DUMMY_PREFIX, 1)),
            removes_whitespace=bool(normaliser.get(_EXTRA_WHITESPACE, 1)),
            escapes_whitespace=bool(normaliser.get(_ESCAPE_WHITESPACE, 1)),
            whitespace_suffix=bool(trainer.get(_WHITESPACE_SUFFIX, 0)),
            fallback=as_fallback(fallback),
        )

    def byte_pieces(self) -> dict[int, int]:
        """Byte to the id of its piece."""
        return {
            int(piece.text[3:-1], 16): token
            for token, piece in enumerate(self.pieces)
            if piece.type == PieceType.BYTE
        }

    def changes(self) -> list[str]:
        """What the model does to a text before it cuts it, in words; empty where it keeps every character."""
        found = []
        if self.maps_characters:
            found.append(f"its normaliser ({self.normaliser or 'user defined'}) replaces characters")
        if self.adds_prefix:
            where = "behind" if self.whitespace_suffix else "in front"
            found.append(f"it puts a space {where} (add_dummy_prefix)")
        if self.removes_whitespace:
            found.append("it removes spaces that follow others or stand at an end (remove_extra_whitespaces)")
        return found


def as_fallback(name: str) -> Fallback:
    """The encoding of this name; ``InvalidInputError`` for one that isn't known."""
    for fallback in FALLBACKS:
        if fallback == name:
            return fallback
    raise InvalidInputError(
        f"characters without a piece in {name!r}; known are {', '.join(FALLBACKS)}", param="fallback"
    )


def with_fallback(data: bytes, fallback: Fallback) -> bytes:
    """A file whose characters without a piece are written in ``fallback``; UTF-8 needs no field.

    ``InvalidInputError`` where ``data`` is no SentencePiece file.
    """
    try:
        rest = b"".join(_field(number, value) for number, value in _fields(data) if number != _FALLBACK)
    except ValueError as error:
        raise InvalidInputError(f"not a SentencePiece model: {error}", param="model") from None
    return rest if fallback == FALLBACKS[0] else rest + _field(_FALLBACK, fallback.encode())


def keeping_every_character(data: bytes) -> bytes:
    """A file that changes nothing of a text, with a piece for every byte: missing ones come last.

    The normaliser becomes the identity, nothing is put in front, spaces stay. The file's own tests of its
    normaliser are left out, because they would fail now.
    """
    model = ModelFile.parse(data)
    missing = [byte for byte in range(256) if byte not in model.byte_pieces()]
    parts = []
    for number, value in _fields(data):
        if number == _TRAINER:
            value = _replaced(_bytes(value), {_BYTE_FALLBACK: 1})
        if number not in (_NORMALISER, _SELF_TEST):
            parts.append(_field(number, value))
    # A file without settings of the trainer has their defaults.
    if _last(list(_fields(data)), _TRAINER, None) is None:
        parts.append(_field(_TRAINER, _field(_BYTE_FALLBACK, 1)))
    settings: list[Field] = [
        (_NAME, b"identity"),
        (_DUMMY_PREFIX, 0),
        (_EXTRA_WHITESPACE, 0),
        (_ESCAPE_WHITESPACE, 1),
    ]
    parts.append(_field(_NORMALISER, b"".join(_field(*setting) for setting in settings)))
    parts += [_field(_PIECES, _byte_piece(byte)) for byte in missing]
    return b"".join(parts)


def _byte_piece(byte: int) -> bytes:
    score = _varint(2 << 3 | 5) + struct.pack("<f", 0.0)
    return _field(1, f"<0x{byte:02X}>".encode()) + score + _field(3, PieceType.BYTE.value)


def _piece(message: bytes) -> Piece:
    fields = dict(_fields(message))
    kind = fields.get(3, PieceType.NORMAL)
    if not isinstance(kind, int):
        raise ValueError(f"a piece is of the type {kind!r}")
    piece = Piece(
        _bytes(fields.get(1, b"")).decode(),
        struct.unpack("<f", _bytes(fields.get(2, bytes(4))))[0],
        PieceType(kind),
    )
    if piece.type == PieceType.BYTE and not _BYTE_NAME.fullmatch(piece.text):
        raise ValueError(f"the byte piece {piece.text!r} names no byte")
    return piece


def _last(fields: list[Field], number: int, default: int | bytes | None) -> int | bytes | None:
    return next((value for found, value in reversed(fields) if found == number), default)


def _bytes(value: int | bytes | None) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a field holds {value!r} in place of bytes")
    return value


def _replaced(message: bytes, values: dict[int, int]) -> bytes:
    kept = [_field(number, value) for number, value in _fields(message) if number not in values]
    return b"".join([*kept, *(_field(number, value) for number, value in values.items())])


class _Fixed(bytes):
    """A field of four or eight bytes, which is written back without a length."""


def _fields(message: bytes) -> Iterator[Field]:
    """Fields of a protocol-buffers message in their order: varints as ints, others as bytes."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        if kind == 2:
            length, at = _read_varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of unknown kind {kind} at byte {at}")
        if at + length > len(message):
            raise ValueError(f"it ends within a field at byte {at}")
        content = message[at : at + length]
        yield number, content if kind == 2 else _Fixed(content)
        at += length


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, _Fixed):
        return _varint(number << 3 | (5 if len(value) == 4 else 1)) + value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not message[at - 1] & 0x80:
            return value, at
    raise ValueError(f"it ends within a number at byte {at}")
