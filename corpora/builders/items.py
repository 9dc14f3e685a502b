"""Items the builders share: digits, emoji, utterances and texts as stored files with their metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ernie5.corpora.builders.manifest import BuiltItem
from ernie5.corpora.builders.pictures import Emoji, digit_pictures, emoji_pictures, fit_on_white, png
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.builders.voices import RECORDED, SAMPLE_RATE, Utterance, opus, speak
from ernie5.corpora.digits import digit_value
from ernie5.corpora.splits import HELD_OUT_VOICES

MIN_SECONDS = 0.12


def digit_item(digit: int, number: int, picture: np.ndarray) -> BuiltItem:
    """A handwritten digit: uint8 [28, 28]; ``number`` is its place among the package's pictures of it."""
    from PIL import Image

    return BuiltItem(
        f"digit-{digit}-{number:04d}",
        "digit_image",
        {"png": png(Image.fromarray(picture))},
        {"label": str(digit), "digit": digit, "source": "mnist"},
    )


def handwritten(home: Path, train: int, test: int, held_out: int = 100) -> Iterator[tuple[str, BuiltItem]]:
    """(split, item) for up to ``train`` and ``test`` pictures of each digit.

    The last ``held_out`` pictures of each digit are for the test split alone.
    """
    for digit, pictures in digit_pictures(home).items():
        first_test = len(pictures) - held_out
        for number in range(min(train, first_test)):
            yield "train", digit_item(digit, number, pictures[number])
        for number in range(first_test, first_test + min(test, held_out)):
            yield "test", digit_item(digit, number, pictures[number])


def emoji_item(emoji: Emoji, style: str, picture: Any, side: int) -> BuiltItem:
    """An emoji in one drawing style, on white, ``side`` pixels wide."""
    return BuiltItem(
        f"emoji-{style}-{emoji.code}",
        "named_picture",
        {"png": png(fit_on_white(picture, side))},
        {
            "label": emoji.names["en"],
            "names": emoji.names,
            "emoji": emoji.characters,
            "style": style,
            "source": style,
        },
    )


def emoji_items(
    style: str,
    home: Path,
    side: int,
    wanted: set[str] | None = None,
    languages: tuple[str, ...] = ("en", "zh"),
) -> Iterator[BuiltItem]:
    """The emoji of a style, or those whose code is in ``wanted``."""
    for emoji, picture in emoji_pictures(style, home, languages):
        if wanted is None or emoji.code in wanted:
            yield emoji_item(emoji, style, picture, side)


def _source(utterance: Utterance) -> str:
    return utterance.voice if utterance.voice in RECORDED else utterance.voice.partition("-")[0]


def _speak(job: tuple[str, Utterance, float]) -> tuple[str, bytes, float] | None:
    item_id, utterance, longest = job
    try:
        clip = speak(utterance)
    except ValueError:  # silent: some voices lack some words
        return None
    seconds = len(clip) / SAMPLE_RATE
    if not MIN_SECONDS <= seconds <= longest:
        return None
    return item_id, opus(clip), seconds


def spoken_items(
    utterances: Iterable[tuple[str, Utterance]], longest: float, report: Report, workers: int = 2
) -> list[tuple[str, BuiltItem]]:
    """(split, item) for (item id, utterance), in ``workers`` processes.

    Clips that are silent or longer than ``longest`` seconds are left out.
    """
    jobs = [(item_id, utterance, longest) for item_id, utterance in utterances]
    by_id = dict((item_id, utterance) for item_id, utterance, _ in jobs)
    made = []
    with ProcessPoolExecutor(workers) as pool:
        for answer in report.track(pool.map(_speak, jobs, chunksize=16), "speaking", len(jobs)):
            if answer is None:
                continue
            item_id, clip, seconds = answer
            utterance = by_id[item_id]
            digit = (
                digit_value(utterance.text, utterance.language) if utterance.language in _LANGUAGES else None
            )
            metadata = {
                "label": utterance.text,
                "language": utterance.language,
                "voice": utterance.voice,
                "human": utterance.file is not None,
                "seconds": round(seconds, 3),
                "rate": utterance.rate,
                "source": _source(utterance),
                **({"accent": utterance.accent, "pitch": utterance.pitch} if utterance.accent else {}),
                **({"digit": digit} if digit is not None else {}),
            }
            split = "test" if utterance.voice in HELD_OUT_VOICES else "train"
            made.append((split, BuiltItem(item_id, "spoken_word", {"ogg": clip}, metadata)))
    return made


_LANGUAGES = frozenset({"en", "zh", "es", "fr", "it", "ru"})


def text_item(item_id: str, text: str, language: str, source: str, label: str) -> BuiltItem:
    """A text of its own; Python source counts as code."""
    extension = "py" if language == "python" else "txt"
    return BuiltItem(
        item_id, "text", {extension: text.encode()}, {"label": label, "language": language, "source": source}
    )
