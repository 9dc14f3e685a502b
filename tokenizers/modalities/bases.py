"""The shipped tokenizers by service, each imported only when it is loaded: the text one needs no torch."""

from __future__ import annotations

import importlib

from ernie5.tokenizers.base import Tokenizer

BASES: dict[str, tuple[str, str]] = {
    "text": ("ernie5.tokenizers.text.tokenizer", "TextTokenizer"),
    "audio": ("ernie5.tokenizers.audio.tokenizer", "AudioTokenizer"),
    "vision": ("ernie5.tokenizers.vision.tokenizer", "VisionTokenizer"),
}


def load_base(service: str) -> Tokenizer:
    """The shipped tokenizer of a service (a key of :data:`BASES`)."""
    module, name = BASES[service]
    return getattr(importlib.import_module(module), name).load()
