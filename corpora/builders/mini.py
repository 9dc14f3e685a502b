"""The corpus that ships: digits, emoji, spoken words and a little text, under 15 MB.

Splits: handwriting by picture; speech by voice (:data:`~ernie5.corpora.splits.HELD_OUT_VOICES`, people among
them); emoji by drawing: all concepts are trained in one style and two thirds of them in a second, the other
third is tested in the second style. Text by the hash of its label.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ernie5.corpora.builders.items import emoji_items, handwritten, spoken_items, text_item
from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import BuiltItem, by_split, write_corpus
from ernie5.corpora.builders.pictures import Emoji, emoji_categories, emoji_names, emoji_pictures
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.builders.voices import (
    FLITE_VOICES,
    RECORDED,
    TEST_TIMBRES,
    TIMBRES,
    Utterance,
    is_speakable,
    random_utterance,
    recordings,
)
from ernie5.corpora.builders.writings import poems, python_functions, verses
from ernie5.corpora.digits import DIGIT_WORDS
from ernie5.corpora.splits import HELD_OUT_VOICES, draw, is_held_out

EMOJI_SIDE = 64
LONGEST_CLIP = 1.28
"""Seconds: 16 frames of the codec."""
TRAIN_CLIPS = 30
"""Synthetic clips of each digit word for training, each in a voice of its own draw."""
HUMAN_RATES = (1.0, 0.92, 0.96, 1.04, 1.08, 1.12)
SHIPPED_RECORDINGS = tuple(package for package in RECORDED if package != "july-es")  # GPL-2: not shipped
_CATEGORIES = {
    "Smileys & Emotion": 55,
    "Animals & Nature": 85,
    "Food & Drink": 70,
    "Objects": 45,
    "Travel & Places": 30,
    "Activities": 15,
}
"""Concepts taken from each category, 300 in all."""
_ALWAYS = ("cat face", "dog face")


def concepts(home: Path) -> list[tuple[Emoji, bool]]:
    """The 300 emoji and whether each one's second drawing is held out (100 of them).

    Short names in both languages, one concept a name. Concepts held out of the image tokenizer's training
    come first among the held-out drawings.
    """
    categories = emoji_categories(home)
    drawn = {emoji.code for emoji, _ in emoji_pictures("twemoji", home)}
    drawn &= {emoji.code for emoji, _ in emoji_pictures("noto", home)}
    seen: set[str] = set()
    by_category: dict[str, list[Emoji]] = {name: [] for name in _CATEGORIES}
    for emoji in emoji_names(home):
        english, chinese = emoji.names["en"], emoji.names.get("zh", "")
        category = categories.get(emoji.code)
        if category not in by_category or emoji.code not in drawn or len(emoji.code.split("-")) > 1:
            continue
        short = re.fullmatch(r"[a-z]+( [a-z]+){0,2}", english) and re.fullmatch(
            "[\u4e00-\u9fff]{1,5}", chinese
        )
        if short and english not in seen and chinese not in seen:
            seen |= {english, chinese}
            by_category[category].append(emoji)
    chosen: list[Emoji] = []
    for category, count in _CATEGORIES.items():
        ranked = sorted(
            by_category[category],
            key=lambda emoji: (
                emoji.names["en"] not in _ALWAYS,
                not is_held_out(emoji.names["en"]),
                draw(f"concept {emoji.code}", 1 << 30),
            ),
        )
        chosen += ranked[:count]
    order = sorted(
        chosen, key=lambda emoji: (not is_held_out(emoji.names["en"]), draw(f"style {emoji.code}", 1 << 30))
    )
    held_out = {emoji.code for emoji in order[: len(chosen) // 3]}
    return [(emoji, emoji.code in held_out) for emoji in chosen]


def _emoji(home: Path, chosen: list[tuple[Emoji, bool]]) -> Iterator[tuple[str, BuiltItem]]:
    codes = {emoji.code for emoji, _ in chosen}
    held_out = {emoji.code for emoji, held in chosen if held}
    for item in emoji_items("noto", home, EMOJI_SIDE, codes):
        yield "train", item
    for item in emoji_items("twemoji", home, EMOJI_SIDE, codes):
        yield ("test" if item.item_id.rpartition("twemoji-")[2] in held_out else "train"), item


def _utterances(home: Path, chosen: list[tuple[Emoji, bool]]) -> Iterator[tuple[str, Utterance]]:
    for language, words in DIGIT_WORDS.items():
        for digit, word in enumerate(words):
            stem = f"speech-{language}-{digit}"
            for number in range(TRAIN_CLIPS):
                yield f"{stem}-t{number:02d}", random_utterance(word, language, f"{stem} {number}", TIMBRES)
            for timbre in TEST_TIMBRES:
                yield f"{stem}-{timbre}", random_utterance(word, language, f"{stem} {timbre}", (timbre,))
    for voice in FLITE_VOICES:
        for digit, word in enumerate(DIGIT_WORDS["en"]):
            for rate in (0.85, 1.0, 1.2):
                yield (
                    f"speech-en-{digit}-{voice}-{round(rate * 100)}",
                    Utterance(word, "en", f"flite-{voice}", rate=rate),
                )
    for package in SHIPPED_RECORDINGS:
        language, _ = RECORDED[package]
        files = recordings(package, home)
        rates = (1.0,) if package in HELD_OUT_VOICES else HUMAN_RATES
        for digit, word in enumerate(DIGIT_WORDS[language]):
            for rate in rates:
                yield (
                    f"speech-{language}-{digit}-{package}-{round(rate * 100)}",
                    Utterance(word, language, package, rate=rate, file=files[f"digits/{digit}"]),
                )
    for language in ("en", "zh"):
        speakable = [emoji for emoji, _ in chosen if is_speakable(emoji.names[language], language)]
        speakable.sort(key=lambda emoji: draw(f"spoken {language} {emoji.code}", 1 << 30))
        for number, emoji in enumerate(speakable[:120]):
            name, stem = emoji.names[language], f"name-{language}-{emoji.code}"
            yield f"{stem}-t", random_utterance(name, language, stem, TIMBRES)
            if number < 24:
                yield f"{stem}-x", random_utterance(name, language, f"{stem} test", TEST_TIMBRES)


def _texts(home: Path) -> Iterator[tuple[str, BuiltItem]]:
    picked = sorted(verses(), key=lambda verse: draw(f"verse {verse[0]}", 1 << 30))
    entries = [
        (f"verse-{number:03d}", text, "en", "bible", reference)
        for number, (reference, text) in enumerate([v for v in picked if len(v[1]) <= 240][:320])
    ]
    for collection, language, longest, count in (
        ("quantangshi", "zh-Hant", 70, 150),
        ("songci", "zh", 110, 150),
    ):
        found = {
            text: title for title, text in poems(home, collection) if len(text) <= longest and "□" not in text
        }
        for number, text in enumerate(sorted(found, key=lambda text: draw(f"poem {text}", 1 << 30))[:count]):
            entries.append((f"{collection}-{number:03d}", text, language, "poems", found[text]))
    functions = sorted(python_functions(), key=lambda function: draw(f"code {function[0]}", 1 << 30))
    for number, (name, source) in enumerate(functions[:120]):
        entries.append((f"python-{number:03d}", source, "python", "python", name))
    for item_id, text, language, source, label in entries:
        yield (
            ("test" if draw(f"split {item_id}", 10) == 0 else "train"),
            text_item(item_id, text, language, source, label),
        )


def build_mini(folder: Path, home: Path, report: Report) -> dict[str, Any]:
    """Write the corpus to ``folder``; returns its manifest."""
    chosen = concepts(home)
    parts = {
        "digits": list(report.track(handwritten(home, train=250, test=50), "handwriting", 3000)),
        "emoji": list(report.track(_emoji(home, chosen), "emoji", 600)),
        "speech": spoken_items(_utterances(home, chosen), LONGEST_CLIP, report),
        "text": list(report.track(_texts(home), "text")),
    }
    shards: dict[str, tuple[str, list[BuiltItem]]] = {}
    for part, items in parts.items():
        shards |= by_split(part, items, compress=True)
    held_out = {
        "voices": sorted({item.metadata["voice"] for split, item in parts["speech"] if split == "test"}),
        "handwriting": "pictures of each digit from its last 100 in the package",
        "emoji": {"style": "twemoji", "concepts": sorted(e.names["en"] for e, held in chosen if held)},
        "text": "one in ten, by the hash of the item id",
    }
    extra = {"python": ".".join(map(str, sys.version_info[:3]))}
    return write_corpus(folder, "mini", shards, LICENCES, held_out, extra=extra)
