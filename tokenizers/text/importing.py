"""SentencePiece models of others as text tokenizers: made to bring every text back, or refused.

Most public models change a text before they cut it (a normaliser, a space in front, spaces removed), and
some have no pieces for bytes. What can be mended without touching a piece or its id is mended: the text is
taken as it is, and missing bytes get pieces behind all others. Pieces that only changed text would reach
stay, unused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from ernie5.protocol.errors import InvalidInputError
from ernie5.tokenizers.text.model_file import Fallback, ModelFile, PieceType, keeping_every_character
from ernie5.tokenizers.text.tokenizer import MAX_TEXT_BYTES, TextTokenizer

MAX_MODEL_BYTES = 64 << 20
# Spaces of every kind and place, line ends, the meta symbol, NUL, joined emoji, combining marks in both
# orders, compatibility forms that normalisers replace, direction marks, the last character of each plane, and
# names of pieces.
_PROBES = (
    "",
    " ",
    "   leading, double  and trailing   ",
    "\t\n\r\n\v\f\0\x1b\x7f\x85\xa0\u2002\u2028\u2029\u202f\u205f\u3000\ufeff\u200b\u00ad",
    "\u2581 \u2581\u2581a\u2581 b",
    "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 👍🏽",
    "e\u0301\u0323 e\u0323\u0301 \u00e9 \u1eb9\u0301 \uac00 \u1100\u1161 ก็",
    "\uff21\uff10\uff01 \ufb01 \u2126 \u212b \u337f ﷽ \u3392 ½ ℌ",
    "\u202eright\u202c \u2066left\u2069",
    "".join(chr(plane << 16 | 0xFFFF) + chr(plane << 16 | 0x1000) for plane in range(17)),
    "<s></s><unk><pad><0x41>[CLS]<|endoftext|>",
)


def import_model(data: bytes, *, fallback: Fallback | None = None) -> tuple[bytes, list[str]]:
    """A model that brings every text back, and what was changed for that, in words.

    Args:
        data: content of a SentencePiece file, BPE or unigram.
        fallback: the encoding of characters without a piece; the file's own where None.

    Raises:
        InvalidInputError: no such file, or one that can't be made to; the message says why.
    """
    file = ModelFile.parse(data)
    if file.algorithm not in ("bpe", "unigram"):
        raise InvalidInputError(
            f"the model cuts by {file.algorithm}; BPE and unigram models can be imported", param="model"
        )
    if not file.escapes_whitespace:
        raise InvalidInputError(
            "the model's pieces hold plain spaces (escape_whitespaces is off), so they can't be told from "
            "U+2581; train it with escape_whitespaces",
            param="model",
        )
    missing = 256 - len(file.byte_pieces())
    changed = bool(file.changes()) or missing > 0 or not file.byte_fallback
    model = keeping_every_character(data) if changed else data
    tokenizer = TextTokenizer(model, fallback=fallback)
    for probe in (*_PROBES, *_all_pieces(file)):
        if tokenizer.text(tokenizer.ids(probe)) != probe:
            raise InvalidInputError(
                f"the model loses characters of {probe[:40]!r} for a reason unknown; it is not imported",
                param="model",
            )
    return tokenizer.model, _changes(file, missing)


def write_import(source: Path, out: Path, *, fallback: Fallback | None = None) -> list[str]:
    """Write ``text.model`` and its card ``text.json`` into the folder ``out``; returns what was changed.

    Raises:
        InvalidInputError: as :func:`import_model`, or the file is above :data:`MAX_MODEL_BYTES` or missing.
    """
    if not source.is_file():
        raise InvalidInputError(f"there is no file {source}", param="model")
    size = source.stat().st_size
    if size > MAX_MODEL_BYTES:
        raise InvalidInputError(
            f"{source} has {size:,} bytes; the limit is {MAX_MODEL_BYTES:,}", param="model"
        )
    data = source.read_bytes()
    model, changes = import_model(data, fallback=fallback)
    tokenizer = TextTokenizer(model)
    card = {
        "kind": f"imported SentencePiece {ModelFile.parse(data).algorithm} model",
        "vocabulary_size": tokenizer.vocabulary_size,
        "fallback": tokenizer.fallback,
        "hash": tokenizer.hash,
        "file": {"name": source.name, "bytes": size, "sha256": hashlib.sha256(data).hexdigest()},
        "changes": changes,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "text.model").write_bytes(model)
    (out / "text.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return changes


def _changes(file: ModelFile, missing: int) -> list[str]:
    said = []
    if file.maps_characters:
        said.append(
            f"the normaliser ({file.normaliser or 'user defined'}) is left out: text is cut as it is written"
        )
    if file.adds_prefix:
        where = "behind" if file.whitespace_suffix else "in front of"
        said.append(
            f"no space is put {where} a text: the word there may have other ids than the original's; "
            "write the space to have them"
        )
    if file.removes_whitespace:
        said.append("spaces at the ends and after others are kept")
    if missing:
        size = len(file.pieces)
        said.append(f"{missing} pieces for bytes follow: {size} become {size + missing}")
    return said


def _all_pieces(file: ModelFile) -> Iterator[str]:
    """The pieces' own texts, one after the other, in portions that the tokenizer takes."""
    texts = [piece.text for piece in file.pieces if piece.type != PieceType.BYTE]
    portion: list[str] = []
    size = 0
    for text in texts:
        size += len(text.encode())
        if size > MAX_TEXT_BYTES and portion:
            yield "".join(portion)
            portion, size = [], len(text.encode())
        portion.append(text[: MAX_TEXT_BYTES // 4])
    yield "".join(portion)
