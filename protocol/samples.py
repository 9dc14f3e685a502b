"""Samples: ordered lists of media segments, as they are read from a corpus or a request.

``role`` says what the model does with a segment: a ``context`` segment is understood and carries no
loss, a ``target`` segment is generated. Two identities exist side by side. *Content identity*
(:attr:`Sample.sample_id`) is a hash of the media with roles and metadata left out; the token cache
uses it. *Order identity* is ``(epoch, position)``, dense, and belongs to the stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ernie5.protocol.modalities import MODALITIES

Role = Literal["context", "target"]

# Content types that say no more than the modality does.
_SILENT_TYPES = ("", "application/octet-stream", "text/plain")


class Segment(BaseModel):
    """One medium of a sample.

    Exactly one of ``text`` (Unicode text modalities) and ``data`` (the encoded bytes of a file: PNG,
    WAV, …) is set. ``reference`` names where the payload lies when it has not been read yet (a path
    inside the corpus; never a URL).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    modality: str
    role: Role = "context"
    text: str | None = None
    data: bytes | None = None
    reference: str | None = None
    content_type: str | None = None
    metadata: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_payload(self) -> Segment:
        given = [name for name in ("text", "data", "reference") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a segment carries exactly one of text, data and reference; this {self.modality} "
                f"segment carries {given or 'none'}"
            )
        if self.modality not in MODALITIES and not self.modality.isidentifier():
            raise ValueError(f"modality {self.modality!r} is not an identifier")
        return self

    @property
    def payload(self) -> bytes:
        """The bytes that the content hash and the wire carry.

        Raises:
            ValueError: the payload is a reference that has not been read, or text that is not valid
                Unicode (a lone surrogate).
        """
        if self.data is not None:
            return self.data
        if self.text is not None:
            return self.text.encode("utf-8")
        raise ValueError(f"segment refers to {self.reference!r}, which has not been read yet")

    @property
    def media_hash(self) -> str:
        """Hash of modality, content type and payload, hex; roles and metadata are left out.

        The type decides how the bytes are read: the same ones are a table of other cells as CSV than as TSV.
        Its parameters, and types that say no more than the modality, are left out.
        """
        digest = hashlib.blake2b(digest_size=16)
        kind = (self.content_type or "").partition(";")[0].strip().lower()
        if kind in _SILENT_TYPES:
            digest.update(self.modality.encode() + b"\0")
        else:
            digest.update(f"{self.modality}\1{len(kind)}:{kind}".encode())
        digest.update(self.payload)
        return digest.hexdigest()


class Sample(BaseModel):
    """An ordered list of segments, with free metadata (labels, split, licence)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    segments: tuple[Segment, ...] = Field(min_length=1)
    metadata: Mapping[str, Any] = Field(default_factory=dict)

    @property
    def sample_id(self) -> str:
        """Content identity: a hash of the segments' media hashes in order, 32 hex digits."""
        digest = hashlib.blake2b(digest_size=16)
        for segment in self.segments:
            digest.update(bytes.fromhex(segment.media_hash))
        return digest.hexdigest()
