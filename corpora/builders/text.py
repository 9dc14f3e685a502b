"""Text: English verses, Chinese poems and sayings, Python source; one part in twenty is held out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ernie5.corpora.builders.items import text_item
from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import BuiltItem, by_split, write_corpus
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.builders.writings import poems, python_functions, sayings, verses
from ernie5.corpora.splits import draw

PASSAGE = 8
"""Verses joined into one text."""
POEMS = {"quantangshi": ("zh-Hant", 20000), "songci": ("zh", 10000), "shijing": ("zh", 400)}
"""Collection to its language and the number of poems taken."""


def passages() -> Iterator[tuple[str, str, str, str, str]]:
    """Consecutive verses as (item id, text, language, source, label)."""
    every = verses()
    for start in range(0, len(every), PASSAGE):
        text = " ".join(text for _, text in every[start : start + PASSAGE])
        yield f"verses-{start:05d}", text, "en", "bible", every[start][0]


def texts(home: Path) -> Iterator[tuple[str, BuiltItem]]:
    """(split, item) for every text."""
    for entry in _entries(home):
        yield ("test" if draw(f"text {entry[0]}", 20) == 0 else "train"), text_item(*entry)


def _entries(home: Path) -> Iterator[tuple[str, str, str, str, str]]:
    yield from passages()
    for collection, (language, count) in POEMS.items():
        for number, (title, text) in enumerate(islice(poems(home, collection), count)):
            yield f"{collection}-{number:05d}", text, language, "poems", title
    for number, text in enumerate(sayings(home)):
        yield f"saying-{number:05d}", text, "zh", "fortunes-zh", f"saying {number}"
    for number, (name, source) in enumerate(python_functions(longest=4000)):
        yield f"python-{number:05d}", source, "python", "python", name


def build_text(folder: Path, home: Path, report: Report) -> dict[str, Any]:
    """Write the corpus to ``folder``; returns its manifest."""
    shards = by_split("text", report.track(texts(home), "texts"), compress=True)
    return write_corpus(
        folder, "text", shards, LICENCES, {"text": "one in twenty, by the hash of the item id"}
    )
