"""What a modality's codec offers: one small class for each modality, on one of the three group layouts.

A codec reads a file of its modality into a value, turns the value into a token span and back, and writes a
file again. It doesn't own a vocabulary: spans of one service share the ids, bits or codebooks of that
service's own tokenizer (the *base*: text, audio or vision), so that the backbone's heads take them unchanged.

A codec's form never changes once it is released, because spans carry the hash of the base alone: another form
is another modality.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from ernie5.protocol.errors import (
    InvalidInputError,
    InvalidMediaError,
    MediaTooLargeError,
    TokenizerMismatchError,
    UnsupportedMediaError,
)
from ernie5.protocol.modalities import Modality
from ernie5.protocol.tokens import SequenceLayout, TokenSpan

Value = TypeVar("Value")

SAMPLES = Path(__file__).parent / "samples"
MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A small real file of a modality, its content type, where it comes from and under which terms."""

    path: Path
    content_type: str
    source: str
    licence: str


@dataclass(frozen=True, slots=True)
class Figure:
    """What a round trip kept: ``value`` in ``unit``, and the ``limit`` that it must not cross.

    ``higher`` says that more is better (decibels); else less is (an error).
    """

    name: str
    value: float
    unit: str
    limit: float
    higher: bool = False

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.higher else self.value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.higher else "≤"
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name} {self.value:.4g}{unit} ({sign} {self.limit:.4g})"


class Codec(ABC, Generic[Value]):
    """One modality's codec; instances hold no state.

    Attributes:
        modality: name, layout and service.
        content_types: what :meth:`read` and :meth:`write` take; the first is the default.
        promise: what comes back, in words, with the bound.
        sample: the file that the round trip is shown on.
        wraps_base: the base takes the modality by itself; the codec only shows it.
        max_bytes: of a file.
    """

    modality: ClassVar[Modality]
    content_types: ClassVar[tuple[str, ...]]
    promise: ClassVar[str]
    sample: ClassVar[SampleFile]
    wraps_base: ClassVar[bool] = False
    max_bytes: ClassVar[int] = MAX_FILE_BYTES

    @abstractmethod
    def read(self, data: bytes, content_type: str) -> Value:
        """The value of a file in one of the content types.

        Raises:
            InvalidMediaError: the file is damaged or holds impossible values.
            MediaTooLargeError: it is above a limit.
        """

    @abstractmethod
    def write(self, value: Value, content_type: str) -> bytes:
        """A file of a value; raises ``InvalidMediaError`` where the container can't hold it."""

    @abstractmethod
    def encode(self, value: Value, base: Any, *, features: bool = False) -> TokenSpan:
        """A span of the value; ``base`` is the service's own tokenizer."""

    @abstractmethod
    def decode(self, span: TokenSpan, base: Any) -> Value:
        """The value of a span that :meth:`encode` made, or that a model wrote in its form.

        Raises:
            InvalidInputError: the codes are not of that form.
        """

    @abstractmethod
    def compare(self, original: Value, decoded: Value) -> Figure:
        """How far the decoded value is from the original."""

    def read_checked(self, data: bytes, content_type: str | None) -> Value:
        """:meth:`read` after checks of size and type; None is the first content type."""
        content_type = self._known(content_type)
        name = self.modality.name
        if not data:
            raise InvalidMediaError(f"the {name} is empty (0 bytes)", param="data")
        if len(data) > self.max_bytes:
            raise MediaTooLargeError(
                f"{name} file of {len(data)} bytes exceeds the limit of {self.max_bytes}", param="data"
            )
        return self.read(data, content_type)

    def write_checked(self, value: Value, content_type: str | None) -> tuple[bytes, str]:
        """:meth:`write` and the type written."""
        content_type = self._known(content_type)
        return self.write(value, content_type), content_type

    def check_span(self, span: TokenSpan, base: Any) -> None:
        """Refuse spans of another modality, layout or tokenizer."""
        if (span.modality, span.layout.kind) != (self.modality.name, self.modality.layout):
            raise UnsupportedMediaError(
                f"a span of {span.modality} with {span.layout.kind} layout is no {self.modality.name} span",
                param="modality",
            )
        if span.tokenizer != base.hash:
            raise TokenizerMismatchError(
                f"the span was made by tokenizer {span.tokenizer}, this is {base.hash}; "
                "load the tokenizer that the model was trained with",
                param="tokenizer",
            )

    def _known(self, content_type: str | None) -> str:
        # Media without a type of their own, and text given as such, are of the first type.
        if content_type in (None, "", "application/octet-stream", "text/plain"):
            return self.content_types[0]
        bare = content_type.partition(";")[0].strip().lower() if content_type else ""
        if bare not in self.content_types:
            raise UnsupportedMediaError(
                f"{self.modality.name} comes as {', '.join(self.content_types)}, not {content_type!r}",
                param="content_type",
            )
        return bare


class TextVocabulary(Protocol):
    """What codecs on the ``sequence`` layout need of the text tokenizer."""

    hash: str
    layout: SequenceLayout

    def ids(self, text: str) -> np.ndarray: ...

    def text(self, ids: np.ndarray) -> str: ...


class TextCodec(Codec[Value]):
    """A codec whose values have a canonical text: its span holds that text's ids of the text vocabulary.

    The text tokenizer brings every string back exactly, so what is lost is lost in :meth:`to_text`.
    """

    max_bytes = 1_000_000

    @abstractmethod
    def to_text(self, value: Value) -> str:
        """The canonical text of a value."""

    @abstractmethod
    def from_text(self, text: str) -> Value:
        """The value of a canonical text; ``InvalidInputError`` for any other."""

    def encode(self, value: Value, base: TextVocabulary, *, features: bool = False) -> TokenSpan:
        return TokenSpan(self.modality.name, base.layout, base.ids(self.to_text(value)), base.hash)

    def decode(self, span: TokenSpan, base: TextVocabulary) -> Value:
        self.check_span(span, base)
        return self.from_text(base.text(span.codes))


def utf8(data: bytes, what: str) -> str:
    """The text of a file, a byte order mark dropped."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidMediaError(
            f"{what} must be UTF-8: {error.reason} at byte {error.start}", param="data"
        ) from None


_ESCAPES = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"}
_PLAIN = {escaped[1]: plain for plain, escaped in _ESCAPES.items()}


def escape(text: str) -> str:
    """``text`` without tabs, line ends and bare backslashes.

    >>> escape("a\\tb")
    'a\\\\tb'
    """
    return "".join(_ESCAPES.get(character, character) for character in text)


def unescape(text: str) -> str:
    """What :func:`escape` was given; ``InvalidInputError`` for an escape that it doesn't write."""
    if "\\" not in text:
        return text
    out, characters = [], iter(text)
    for character in characters:
        if character == "\\":
            code = next(characters, "")
            if code not in _PLAIN:
                raise InvalidInputError(f"unknown escape \\{code} in {text[:40]!r}", param="codes")
            character = _PLAIN[code]
        out.append(character)
    return "".join(out)


def integers(text: str, count: int, where: str) -> list[int]:
    """``count`` integers of at most 12 digits, single spaces between; ``InvalidInputError`` otherwise."""
    parts = text.split(" ")
    if len(parts) != count or not all(
        part.removeprefix("-").isdecimal() and len(part) <= 13 for part in parts
    ):
        raise InvalidInputError(f"{where}: expected {count} integers, got {text[:60]!r}", param="codes")
    return [int(part) for part in parts]
