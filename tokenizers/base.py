"""What every tokenizer offers, whatever its modality.

A tokenizer turns media into :class:`~ernie5.protocol.tokens.TokenSpan` objects and back. The typed methods
(``encode``, ``decode``) of each modality work on that modality's objects (a picture, a waveform, a
string); the two batch methods here work on segments and bytes, so that services and the stream
need to know no modality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ernie5.protocol.errors import ErnieMultiError
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSpan


@dataclass(frozen=True, slots=True)
class Medium:
    """An encoded medium: its bytes and their content type (``image/png``, ``audio/wav``, ``text/plain``)."""

    data: bytes
    content_type: str


@runtime_checkable
class Tokenizer(Protocol):
    """The face that services use.

    ``hash`` (hex) identifies weights, device kind and dtype: equal hashes give equal codes for equal
    media. ``modalities`` names what it takes.
    """

    hash: str
    modalities: tuple[str, ...]

    def encode_segments(
        self, segments: Sequence[Segment], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        """Tokenise a batch; a bad segment yields its error and leaves the others untouched.

        The result of each segment doesn't depend on its neighbours in the batch.
        """
        ...

    def decode_spans(
        self, spans: Sequence[TokenSpan], *, content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        """Turn spans back into encoded media; ``content_type`` picks the container where several fit."""
        ...
