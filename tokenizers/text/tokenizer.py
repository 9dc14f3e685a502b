"""The text tokenizer: SentencePiece pieces with byte fallback.

Any valid Unicode string comes back exactly. SentencePiece writes a space as U+2581 inside its pieces, so that
this character itself would come back as a space: here it is cut out before encoding and written as its bytes,
for which the vocabulary has pieces. Decoding joins the bytes of pieces and never goes through SentencePiece.

The bytes are those of UTF-8, or, as in the ERNIE 5.0 report, of UTF-16BE: then all characters without a piece
are cut out here, because SentencePiece knows UTF-8 only, and one of Chinese takes two tokens, not three.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece

from ernie5.protocol.errors import (
    ErnieMultiError,
    InvalidInputError,
    InvalidMediaError,
    MediaTooLargeError,
    TokenizerMismatchError,
    UnsupportedMediaError,
)
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import SequenceLayout, TokenSpan
from ernie5.tokenizers.base import Medium
from ernie5.tokenizers.text.decoder import IncrementalDecoder
from ernie5.tokenizers.text.dropout import BpeDropout, Merges
from ernie5.tokenizers.text.model_file import Fallback, ModelFile, PieceType, with_fallback

WEIGHTS = Path(__file__).parent / "weights"
MAX_TEXT_BYTES = 1_000_000
CONTENT_TYPE = "text/plain; charset=utf-8"

_META = "\u2581"
_UNKNOWN = "\ufffd".encode()


class TextTokenizer:
    """Text to int32 ids in ``[0, vocabulary_size)`` and back.

    Attributes:
        modalities: ``("text", "code")``; both have the same ids.
        vocabulary_size: number of pieces V.
        model: the content of the file, its fallback noted.
        hash: hex; identifies the model file, its fallback, device kind and dtype.
        is_byte: bool ``[V]``, the pieces that are single bytes.
        fallback: the encoding of characters without a piece, ``utf-8`` or ``utf-16be``.
    """

    modalities: tuple[str, ...] = ("text", "code")

    def __init__(self, model: bytes, *, fallback: Fallback | None = None) -> None:
        """``model`` is the content of a SentencePiece file; ``fallback`` is what the file says where None.

        Raises:
            InvalidInputError: it is no such file, or one that would lose characters; the message says how.
        """
        if fallback is not None:
            model = with_fallback(model, fallback)
        file = ModelFile.parse(model)
        reasons = why_not_exact(file)
        if reasons:
            raise InvalidInputError(
                f"the SentencePiece model would not bring every text back: {'; '.join(reasons)}; "
                "`ernie-multi tokenizer import` makes one that does, where that can be",
                param="model",
            )
        processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise InvalidInputError(f"not a SentencePiece model: {error}", param="model") from None
        if not loaded or processor.vocab_size() != len(file.pieces):
            raise InvalidInputError("not a SentencePiece model", param="model")
        self.model: bytes = model
        self._file = file
        self._processor = processor
        self.fallback: Fallback = file.fallback
        self.vocabulary_size: int = processor.vocab_size()
        self.hash: str = hashlib.blake2b(b"text\0cpu\0int32\0" + model, digest_size=16).hexdigest()
        self.layout = SequenceLayout(self.vocabulary_size)
        self.is_byte: np.ndarray = np.array([piece.type == PieceType.BYTE for piece in file.pieces])
        byte_ids = file.byte_pieces()
        self._byte_ids = [byte_ids[byte] for byte in range(256)]
        self._piece_bytes: list[bytes] = [self._bytes_of(token) for token in range(self.vocabulary_size)]
        self._cut = self._spelled_characters()

    @classmethod
    def load(
        cls, path: str | os.PathLike[str] | None = None, *, fallback: Fallback | None = None
    ) -> TextTokenizer:
        """The tokenizer of a ``.model`` file or of a folder with ``text.model``, else the shipped one.

        Raises:
            InvalidInputError: as the constructor, the file's name in front.
            FileNotFoundError: there is no such file.
        """
        file = Path(path) if path is not None else WEIGHTS
        if file.is_dir():
            file = file / "text.model"
        try:
            return cls(file.read_bytes(), fallback=fallback)
        except InvalidInputError as error:
            raise InvalidInputError(f"{file}: {error.message}", param=error.param) from None

    def _bytes_of(self, token: int) -> bytes:
        piece = self._file.pieces[token]
        if piece.type == PieceType.CONTROL:
            return b""
        if piece.type == PieceType.UNKNOWN:
            return _UNKNOWN
        if piece.type == PieceType.BYTE:
            return bytes([int(piece.text[3:-1], 16)])
        return piece.text.replace(_META, " ").encode()

    def _spelled_characters(self) -> re.Pattern[str]:
        """Finds what is written as bytes before SentencePiece sees the text."""
        if self.fallback == "utf-8":
            return re.compile(f"{_META}+")
        kinds = (PieceType.NORMAL, PieceType.USER_DEFINED)
        known = {piece.text for piece in self._file.pieces if piece.type in kinds and len(piece.text) == 1}
        known = known - {_META} | {" "}
        return re.compile(f"[^{''.join(re.escape(character) for character in sorted(known))}]+")

    def ids(self, text: str, *, dropout: BpeDropout | None = None) -> np.ndarray:
        """int32 ``[n]`` ids of the text; ``dropout`` gives another cut of it, a function of the two alone.

        Raises:
            InvalidMediaError: the text holds a lone surrogate.
            MediaTooLargeError: more than ``MAX_TEXT_BYTES`` of UTF-8.
            InvalidInputError: dropout with a model that has no merges.
        """
        check_text(text)
        drops = dropout.drops(text) if dropout is not None and dropout.rate > 0 else None
        ids: list[int] = []
        start = 0
        for found in self._cut.finditer(text):
            ids += self._encode(text[start : found.start()], drops)
            ids += [self._byte_ids[byte] for byte in found.group().encode(self.fallback)]
            start = found.end()
        ids += self._encode(text[start:], drops)
        return np.array(ids, np.int32)

    def _encode(self, run: str, drops: Iterator[bool] | None) -> list[int]:
        if not run:
            return []
        if drops is not None:
            return self._merges.ids(run, drops)
        return self._processor.EncodeAsIds(run)

    @cached_property
    def _merges(self) -> Merges:
        return Merges(self._file)

    def text(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that form no character become U+FFFD.

        Raises:
            InvalidInputError: an id outside ``[0, vocabulary_size)``.
        """
        tokens = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary_size:
            raise InvalidInputError(
                f"ids in [{min(tokens)}, {max(tokens)}] leave the vocabulary [0, {self.vocabulary_size})"
            )
        if self.fallback == "utf-8":
            return b"".join([self._piece_bytes[token] for token in tokens]).decode("utf-8", "replace")
        decoder = self.incremental_decoder()
        return decoder.push(tokens) + decoder.finish()

    def incremental_decoder(self) -> IncrementalDecoder:
        """A decoder for one stream of ids that emits whole characters only."""
        return IncrementalDecoder(self._piece_bytes, self.is_byte, self.fallback)

    def encode(self, text: str, modality: str = "text", *, dropout: BpeDropout | None = None) -> TokenSpan:
        """One text as a span with the ``sequence`` layout; raises as :meth:`ids`."""
        if modality not in self.modalities:
            raise UnsupportedMediaError(
                f"the text tokenizer takes {', '.join(self.modalities)}, not {modality!r}", param="modality"
            )
        return TokenSpan(modality, self.layout, self.ids(text, dropout=dropout), self.hash)

    def decode(self, span: TokenSpan) -> str:
        """The text of a span.

        Raises:
            UnsupportedMediaError: the span is of another modality.
            TokenizerMismatchError: another tokenizer made it.
        """
        if span.modality not in self.modalities:
            raise UnsupportedMediaError(
                f"the text tokenizer decodes {', '.join(self.modalities)}, not {span.modality!r}",
                param="modality",
            )
        if span.tokenizer != self.hash:
            raise TokenizerMismatchError(
                f"the span was made by tokenizer {span.tokenizer}, this is {self.hash}; "
                "load the tokenizer that the model was trained with",
                param="tokenizer",
            )
        return self.text(span.codes)

    def encode_segments(
        self,
        segments: Sequence[Segment],
        *,
        features: bool = True,
        latent: bool = False,
        dropout: BpeDropout | None = None,
        positions: Sequence[int] | None = None,
    ) -> list[TokenSpan | ErnieMultiError]:
        """A span or an error for each segment; text has neither features nor latent.

        Args:
            dropout: cuts that training draws anew; off where None. Spans keep the tokenizer's hash, so a
                cache of spans has to name rate, seed and position beside it.
            positions: of each segment's sample in the order of the run, for ``dropout``; its own for all
                where None.
        """
        cuts: list[BpeDropout | None] = [dropout] * len(segments)
        if dropout is not None and positions is not None:
            cuts = [dropout.at(position) for position in positions]
        results: list[TokenSpan | ErnieMultiError] = []
        for segment, cut in zip(segments, cuts, strict=True):
            try:
                results.append(self.encode(_text_of(segment), segment.modality, dropout=cut))
            except ErnieMultiError as error:
                results.append(error)
        return results

    def decode_spans(
        self, spans: Sequence[TokenSpan], *, content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        """UTF-8 text, or an error, for each span."""
        results: list[Medium | ErnieMultiError] = []
        for span in spans:
            try:
                if content_type is not None and not content_type.lower().startswith("text/"):
                    raise UnsupportedMediaError(
                        f"text decodes to text/plain, not {content_type!r}", param="content_type"
                    )
                results.append(Medium(self.decode(span).encode(), CONTENT_TYPE))
            except ErnieMultiError as error:
                results.append(error)
        return results


def why_not_exact(file: ModelFile) -> list[str]:
    """Why a model does not bring every text back, in words; empty where it does."""
    reasons = file.changes()
    if file.algorithm not in ("bpe", "unigram"):
        reasons.append(f"it cuts by {file.algorithm}; BPE and unigram models can be used")
    if not file.escapes_whitespace:
        reasons.append("its pieces hold plain spaces (escape_whitespaces is off)")
    missing = 256 - len(file.byte_pieces())
    if missing or not file.byte_fallback:
        reasons.append(
            f"characters without a piece are lost: byte fallback is {'on' if file.byte_fallback else 'off'}, "
            f"{missing} of 256 byte pieces are missing"
        )
    return reasons


def check_text(text: str) -> None:
    """Refuse text that is too long or no valid Unicode."""
    # A character has at least one byte, so that this needs no encoding of a huge string.
    if len(text) > MAX_TEXT_BYTES:
        raise MediaTooLargeError(
            f"text of {len(text)} characters exceeds {MAX_TEXT_BYTES} bytes", param="text"
        )
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidMediaError(
            f"text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at {error.start}",
            param="text",
        ) from None
    if size > MAX_TEXT_BYTES:
        raise MediaTooLargeError(f"text of {size} bytes exceeds the limit of {MAX_TEXT_BYTES}", param="text")


def _text_of(segment: Segment) -> str:
    if segment.text is not None:
        return segment.text
    if segment.data is None:
        raise InvalidMediaError(
            f"segment refers to {segment.reference!r}, which has not been read", param="text"
        )
    if len(segment.data) > MAX_TEXT_BYTES:
        raise MediaTooLargeError(
            f"text of {len(segment.data)} bytes exceeds the limit of {MAX_TEXT_BYTES}", param="data"
        )
    try:
        return segment.data.decode()
    except UnicodeDecodeError as error:
        raise InvalidMediaError(
            f"text is not valid UTF-8: {error.reason} at byte {error.start}", param="data"
        ) from None
