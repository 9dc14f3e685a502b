"""Speech beyond digits: emoji names in six languages, verses and poems, spoken by many voices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ernie5.corpora.builders.items import spoken_items
from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import by_split, write_corpus
from ernie5.corpora.builders.pictures import emoji_names
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.builders.voices import (
    ACCENTS,
    FLITE_VOICES,
    TEST_TIMBRES,
    TIMBRES,
    Utterance,
    random_utterance,
)
from ernie5.corpora.builders.writings import poems, verses
from ernie5.corpora.splits import HELD_OUT_VOICES, draw

LONGEST_CLIP = 12.0
NAMES = {"en": 1000, "zh": 1000, "es": 400, "fr": 400, "it": 400, "ru": 400}
"""Emoji names spoken in each language."""
VERSES, POEM_LINES = 500, 500


def _timbres(key: str) -> tuple[str, ...]:
    return TEST_TIMBRES if draw(f"held out {key}", 10) == 0 else TIMBRES


def utterances(home: Path) -> Iterator[tuple[str, Utterance]]:
    """Names, verses and lines of poems, one in ten in a held-out voice."""
    names = emoji_names(home, tuple(ACCENTS))
    for language, count in NAMES.items():
        named = [emoji for emoji in names if language in emoji.names]
        named.sort(key=lambda emoji: draw(f"speech {language} {emoji.code}", 1 << 30))
        for emoji in named[:count]:
            key = f"name-{language}-{emoji.code}"
            yield key, random_utterance(emoji.names[language], language, key, _timbres(key))
    lines = sorted(
        (text for _, text in verses() if 40 < len(text) < 140), key=lambda text: draw(text, 1 << 30)
    )
    for number, text in enumerate(lines[:VERSES]):
        key = f"verse-{number:03d}"
        yield key, random_utterance(text, "en", key, _timbres(key))
        if number < VERSES // 5:
            voice = FLITE_VOICES[number % len(FLITE_VOICES)]
            yield f"{key}-{voice}", Utterance(text, "en", f"flite-{voice}")
    songs = {line for _, poem in poems(home, "songci") for line in poem.split("\n") if 5 <= len(line) <= 24}
    for number, text in enumerate(sorted(songs, key=lambda text: draw(text, 1 << 30))[:POEM_LINES]):
        key = f"poem-{number:03d}"
        yield key, random_utterance(text, "zh", key, _timbres(key))


def build_speech(folder: Path, home: Path, report: Report) -> dict[str, Any]:
    """Write the corpus to ``folder``; returns its manifest."""
    shards = by_split("speech", spoken_items(utterances(home), LONGEST_CLIP, report))
    return write_corpus(folder, "speech", shards, LICENCES, {"voices": sorted(HELD_OUT_VOICES)})
