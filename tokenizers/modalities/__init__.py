"""Every modality on one of three group layouts: a small codec each, and the registry that plug-ins join."""

from __future__ import annotations

from ernie5.tokenizers.modalities.codec import Codec, Figure, SampleFile, TextCodec
from ernie5.tokenizers.modalities.registry import BUILT_IN, Registry, load_registry, round_trip
from ernie5.tokenizers.modalities.service import ServiceTokenizer, with_modalities

__all__ = [
    "BUILT_IN",
    "Codec",
    "Figure",
    "Registry",
    "SampleFile",
    "ServiceTokenizer",
    "TextCodec",
    "load_registry",
    "round_trip",
    "with_modalities",
]
