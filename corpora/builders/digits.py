"""All ten thousand handwritten digits, and the digits as spoken by people and programs in six languages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ernie5.corpora.builders.items import handwritten, spoken_items
from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import by_split, write_corpus
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.builders.voices import (
    FLITE_VOICES,
    RECORDED,
    TEST_TIMBRES,
    Utterance,
    random_utterance,
    recordings,
)
from ernie5.corpora.digits import DIGIT_WORDS
from ernie5.corpora.splits import HELD_OUT_VOICES

TRAIN_CLIPS = 100
LONGEST_CLIP = 1.92
HUMAN_RATES = (1.0, 0.9, 0.93, 0.96, 1.04, 1.07, 1.1, 1.13)


def utterances(home: Path) -> Iterator[tuple[str, Utterance]]:
    """Every digit word in synthetic voices by draw, in Flite's voices, and as recorded, at several rates."""
    for language, words in DIGIT_WORDS.items():
        for digit, word in enumerate(words):
            stem = f"speech-{language}-{digit}"
            for number in range(TRAIN_CLIPS):
                yield f"{stem}-t{number:03d}", random_utterance(word, language, f"digits {stem} {number}")
            for timbre in TEST_TIMBRES:
                for number in range(2):
                    key = f"digits {stem} {timbre} {number}"
                    yield f"{stem}-{timbre}-{number}", random_utterance(word, language, key, (timbre,))
    for voice in FLITE_VOICES:
        for digit, word in enumerate(DIGIT_WORDS["en"]):
            for rate in (0.8, 0.9, 1.0, 1.1, 1.2):
                utterance = Utterance(word, "en", f"flite-{voice}", rate=rate)
                yield f"speech-en-{digit}-{voice}-{round(rate * 100)}", utterance
    for package, (language, _) in RECORDED.items():
        files = recordings(package, home)
        for digit, word in enumerate(DIGIT_WORDS[language]):
            for rate in (1.0,) if package in HELD_OUT_VOICES else HUMAN_RATES:
                utterance = Utterance(word, language, package, rate=rate, file=files[f"digits/{digit}"])
                yield f"speech-{language}-{digit}-{package}-{round(rate * 100)}", utterance


def build_digits(folder: Path, home: Path, report: Report) -> dict[str, Any]:
    """Write the corpus to ``folder``; returns its manifest."""
    shards = {
        **by_split("handwriting", report.track(handwritten(home, 1 << 30, 100), "handwriting", 10000)),
        **by_split("speech", spoken_items(utterances(home), LONGEST_CLIP, report)),
    }
    held_out = {"voices": sorted(HELD_OUT_VOICES), "handwriting": "the last 100 pictures of each digit"}
    return write_corpus(folder, "digits", shards, LICENCES, held_out)
