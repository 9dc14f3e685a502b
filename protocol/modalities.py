"""The modalities the unified vocabulary knows and the service that tokenises each.

Three layouts of token groups carry every modality (see :mod:`ernie5.protocol.tokens`), so a new one
needs a tokenizer and an entry here, and nothing in the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayoutKind = Literal["sequence", "scales", "codebooks"]
ServiceName = Literal["text", "audio", "vision"]


@dataclass(frozen=True, slots=True)
class Modality:
    """A modality: its name, the token layout it uses and the service that tokenises it."""

    name: str
    layout: LayoutKind
    service: ServiceName


# The order fixes marker ids; append only.
MODALITIES: dict[str, Modality] = {
    modality.name: modality
    for modality in (
        Modality("text", "sequence", "text"),
        Modality("code", "sequence", "text"),
        Modality("image", "scales", "vision"),
        Modality("video", "scales", "vision"),
        Modality("speech", "codebooks", "audio"),
        Modality("sound", "codebooks", "audio"),
        Modality("depth", "scales", "vision"),
        Modality("series", "codebooks", "audio"),
        Modality("table", "sequence", "text"),
        Modality("points", "scales", "vision"),
        Modality("boxes", "sequence", "text"),
        Modality("sketch", "scales", "vision"),
        Modality("molecule", "sequence", "text"),
        Modality("track", "sequence", "text"),
    )
}


def modality_of(name: str) -> Modality:
    """The modality called ``name``; ``ValueError`` lists the known names."""
    try:
        return MODALITIES[name]
    except KeyError:
        known = ", ".join(MODALITIES)
        raise ValueError(f"unknown modality {name!r}; known: {known}") from None
