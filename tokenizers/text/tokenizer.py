"""The text tokenizer: SentencePiece BPE with byte fallback.

Any valid Unicode string comes back exactly. SentencePiece writes a space as U+2581 inside its pieces, so that
this character itself would come back as a space: here it is cut out before encoding and written as its three
UTF-8 bytes, for which the vocabulary has pieces. Decoding joins the bytes of pieces and never goes through
SentencePiece.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
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
        hash: hex; identifies the model file, device kind and dtype.
        is_byte: bool ``[V]``, the pieces that are single bytes.
    """

    modalities: tuple[str, ...] = ("text", "code")

    def __init__(self, model: bytes) -> None:
        """``model`` is the content of a SentencePiece file with byte fallback; ``ValueError`` otherwise."""
        processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"not a SentencePiece model: {error}") from None
        if not loaded:
            raise ValueError("not a SentencePiece model")
        self._processor = processor
        self.vocabulary_size: int = processor.vocab_size()
        self.hash: str = hashlib.blake2b(b"text\0cpu\0int32\0" + model, digest_size=16).hexdigest()
        self.layout = SequenceLayout(self.vocabulary_size)
        ids = range(self.vocabulary_size)
        self.is_byte: np.ndarray = np.array([processor.IsByte(token) for token in ids])
        if self.is_byte.sum() != 256:
            raise ValueError("the SentencePiece model lacks byte fallback")
        self._piece_bytes: list[bytes] = [self._bytes_of(token) for token in ids]
        self._meta_ids = [processor.PieceToId(f"<0x{byte:02X}>") for byte in _META.encode()]

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> TextTokenizer:
        """The tokenizer of a ``.model`` file or of a folder with ``text.model``, else the shipped one."""
        file = Path(path) if path is not None else WEIGHTS
        if file.is_dir():
            file = file / "text.model"
        return cls(file.read_bytes())

    def _bytes_of(self, token: int) -> bytes:
        if self._processor.IsControl(token):
            return b""
        if self._processor.IsUnknown(token):
            return _UNKNOWN
        piece = self._processor.IdToPiece(token)
        if self.is_byte[token]:
            return bytes([int(piece[1:-1], 16)])
        return piece.replace(_META, " ").encode()

    def ids(self, text: str) -> np.ndarray:
        """int32 ``[n]`` ids of the text.

        Raises:
            InvalidMediaError: the text holds a lone surrogate.
            MediaTooLargeError: more than ``MAX_TEXT_BYTES`` of UTF-8.
        """
        check_text(text)
        runs = text.split(_META)
        ids: list[int] = list(self._encode(runs[0]))
        for run in runs[1:]:
            ids += self._meta_ids
            ids += self._encode(run)
        return np.array(ids, np.int32)

    def _encode(self, run: str) -> list[int]:
        if not run:
            return []
        return self._processor.EncodeAsIds(run)

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
        return b"".join([self._piece_bytes[token] for token in tokens]).decode("utf-8", "replace")

    def incremental_decoder(self) -> IncrementalDecoder:
        """A decoder for one stream of ids that emits whole characters only."""
        return IncrementalDecoder(self._piece_bytes)

    def encode(self, text: str, modality: str = "text") -> TokenSpan:
        """One text as a span with the ``sequence`` layout; raises as :meth:`ids`."""
        if modality not in self.modalities:
            raise UnsupportedMediaError(
                f"the text tokenizer takes {', '.join(self.modalities)}, not {modality!r}", param="modality"
            )
        return TokenSpan(modality, self.layout, self.ids(text), self.hash)

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
        self, segments: Sequence[Segment], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        """A span or an error for each segment; text has neither features nor latent."""
        results: list[TokenSpan | ErnieMultiError] = []
        for segment in segments:
            try:
                results.append(self.encode(_text_of(segment), segment.modality))
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
