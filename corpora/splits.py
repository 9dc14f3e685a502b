"""Which things a model never sees in training: concepts by name, voices by name.

A split is a pure function of a name, so corpora built apart agree: a concept held out of the pictures a
tokenizer trains on is held out of every corpus that names it.
"""

from __future__ import annotations

import hashlib
import re

HELD_OUT_VOICES: frozenset[str] = frozenset(
    {
        "espeak-m7",
        "espeak-f5",
        "espeak-Annie",
        "espeak-boris",
        "flite-awb",
        "menardi-it",
        "armelle-fr",
        "july-es",
    }
)
"""Voices of the test split: four synthetic timbres, one of another synthesiser, three people."""

_PEOPLE = re.compile(r"\b(wo)?m[ae]n\b|\b(person|people|boy|girl|mrs?|mx)\b\.?")


def concept_key(name: str) -> str:
    """What a picture shows, without who does it: ``"woman running"`` and ``"man running"`` agree."""
    plain = re.sub(r"[^a-z0-9]+", " ", _PEOPLE.sub("", name.lower())).strip()
    return plain or name.lower()


def is_held_out(name: str, every: int = 10) -> bool:
    """Whether a concept is among the one in ``every`` that are held out, by the MD5 of its key."""
    return int(hashlib.md5(concept_key(name).encode(), usedforsecurity=False).hexdigest(), 16) % every == 0


def draw(key: str, count: int) -> int:
    """A number in ``[0, count)`` fixed by ``key``: random choices that no library version changes."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % count
