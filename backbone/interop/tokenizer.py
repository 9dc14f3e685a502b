"""A SentencePiece BPE model with byte fallback as the files of a Hugging Face tokenizer, and back.

``tokenizer.json`` is written so that ``AutoTokenizer`` gives the very ids of the text tokenizer, and markers
as special tokens behind them. Two things differ from the usual conversion of Llama's tokenizers:

* pieces hold plain spaces instead of U+2581. There is then nothing to normalise, and the character U+2581
  itself, which no piece holds, falls back to its bytes as it does here;
* only pieces that text may become are merged, so that "<unk>" typed by a user is five characters.

A marker's name in a text, such as ``<|end_turn|>``, does become the marker there, as is usual in such
tokenizers; the text tokenizer keeps it text. Servers that take untrusted text must cut the names out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.vocabulary import MARKER_SLOTS, UnifiedVocabulary

SENTENCEPIECE_FILE = "tokenizer.model"
_META = "\u2581"
# Field numbers of sentencepiece_model.proto
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
# The text tokenizer's own field: the encoding of characters without a piece, UTF-8 where there is none.
_FALLBACK = 1610
_UNUSED_TYPE = 5

# What system and user say is context, earlier answers are targets; neighbouring texts of one role are
# kept apart: the order of TokenSequence.events.
CHAT_TEMPLATE = (
    "<|begin_sample|>"
    "{% for message in messages %}"
    "{% set role = 'target' if message['role'] == 'assistant' else 'context' %}"
    "{% set before = 'none' if loop.first else "
    "('target' if messages[loop.index0 - 1]['role'] == 'assistant' else 'context') %}"
    "{% if role != before %}{{ '<|end_turn|>' if before == 'target' else '' }}{{ '<|' + role + '|>' }}"
    "{% else %}<|separator|>{% endif %}"
    "{{ message['content'] }}"
    "{% if loop.last and role == 'target' %}<|end_turn|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|target|>{% endif %}"
)


def marker_token(vocabulary: UnifiedVocabulary, slot: int) -> str:
    """How the marker of a slot is written in a Hugging Face vocabulary."""
    name = vocabulary.marker_name(vocabulary.text_size + slot)
    return f"<|{name}|>" if name is not None else f"<|reserved_{slot}|>"


def write_tokenizer(model: bytes, vocabulary: UnifiedVocabulary, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json``, the chat template and ``tokenizer.model``.

    Args:
        model: content of a SentencePiece file.
        vocabulary: its text part must have the model's size.
        folder: made if need be.

    Raises:
        InvalidInputError: the model is no BPE with byte fallback that keeps text as it is, or has another
            size.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.vocab_size()
    if size != vocabulary.text_size:
        raise InvalidInputError(
            f"the text tokenizer has {size} pieces, the model was trained with {vocabulary.text_size}"
        )
    reason = why_not_lossless(model)
    if reason is not None:
        raise InvalidInputError(f"the text tokenizer can't be exported: {reason}")
    tokens = [marker_token(vocabulary, slot) for slot in range(MARKER_SLOTS)]
    names = {name: marker_token(vocabulary, vocabulary.marker(name) - size) for name in _NAMED.values()}
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(size + slot, token) for slot, token in enumerate(tokens)],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(processor),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: names[name] for key, name in _NAMED.items()},
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder / "tokenizer.json", content)
    _write(folder / "tokenizer_config.json", settings)
    (folder / SENTENCEPIECE_FILE).write_bytes(model)


_NAMED = {"bos_token": "begin_sample", "eos_token": "end_turn", "pad_token": "pad"}


def _special(token: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, **flags, "special": True}


def _bpe(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """SentencePiece's merges by rank: of all neighbours it joins those whose whole has the best score, and
    the leftmost of equals. A whole that has several halves gets a merge for each, one after the other."""
    size = processor.vocab_size()
    pieces = [processor.IdToPiece(token).replace(_META, " ") for token in range(size)]
    plain = {
        piece: processor.GetScore(token)
        for token, piece in enumerate(pieces)
        if not (
            processor.IsByte(token)
            or processor.IsControl(token)
            or processor.IsUnknown(token)
            or processor.IsUnused(token)
        )
    }
    merges: list[tuple[str, str]] = []
    for piece in sorted(plain, key=lambda piece: -plain[piece]):
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(left, right) for left, right in cuts if left in plain and right in plain]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {piece: token for token, piece in enumerate(pieces)},
        "merges": [list(pair) for pair in merges],
    }


def why_not_lossless(model: bytes) -> str | None:
    """Why a SentencePiece model can't be the text tokenizer, or None if it can.

    That one is a BPE that changes no character of a text before it cuts it and has a piece for every byte.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    if sum(processor.IsByte(token) for token in range(processor.vocab_size())) != 256:
        return "it has no pieces for bytes (byte_fallback)"
    trainer = dict(_fields(dict(_fields(model)).get(_TRAINER, b"")))
    if trainer.get(3, 1) != 2:  # TrainerSpec.model_type: 2 is BPE, 1 (unigram) the default
        return "it is no BPE model"
    fallback = dict(_fields(model)).get(_FALLBACK, b"utf-8")
    if fallback != b"utf-8":
        return f"it writes characters without a piece in {fallback.decode(errors='replace')}, not in UTF-8"
    # Two spaces, both ends, a full-width letter, a ligature, a combining accent, tab and newline.
    probe = "  a  \uff21\ufb01e\u0301\t\n b "
    if processor.Normalize(probe) != probe.replace(" ", _META):
        return "it changes text before cutting it (normalizer, add_dummy_prefix or remove_extra_whitespaces)"
    return None


def padded(model: bytes, size: int) -> bytes:
    """A SentencePiece model with ``size`` pieces: unused ones follow those that it has.

    A network's table of embeddings is often longer than its tokenizer; ids must be counted the same.
    """
    count = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    if count > size:
        raise InvalidInputError(f"the tokenizer has {count} pieces, the network's vocabulary only {size}")
    return model + b"".join(_unused_piece(f"<|unused_{token}|>") for token in range(count, size))


def _unused_piece(name: str) -> bytes:
    """A ModelProto.SentencePiece as bytes; repeated fields of protocol buffers may simply be appended."""
    text = name.encode()
    body = bytes([0x0A, len(text)]) + text + bytes([0x15, 0, 0, 0, 0, 0x18, _UNUSED_TYPE])
    return bytes([_PIECES << 3 | 2, len(body)]) + body


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """Fields of a protocol-buffers message: varints as ints, the rest as bytes."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            found.append((key >> 3, value))
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise InvalidInputError("not a SentencePiece model")
        found.append((key >> 3, message[at : at + length]))
        at += length
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not message[at - 1] & 0x80:
            break
    return value, at


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
