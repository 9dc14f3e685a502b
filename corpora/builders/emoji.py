"""About 1,900 emoji in three drawing styles, named in twelve languages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ernie5.corpora.builders.items import emoji_items
from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import BuiltItem, by_split, write_corpus
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.splits import is_held_out

SIDE = 96
LANGUAGES = ("en", "zh", "es", "fr", "it", "ru", "de", "pt", "ja", "ko", "ar", "tr")
TEST_STYLE = "twemoji"


def pictures(home: Path) -> Iterator[tuple[str, BuiltItem]]:
    """(split, item): a held-out concept is tested in one style and trained in the others."""
    for style in ("noto", "twemoji", "fluent"):
        for item in emoji_items(style, home, SIDE, languages=LANGUAGES):
            held_out = style == TEST_STYLE and is_held_out(item.metadata["label"])
            yield ("test" if held_out else "train"), item


def build_emoji(folder: Path, home: Path, report: Report) -> dict[str, Any]:
    """Write the corpus to ``folder``; returns its manifest."""
    shards = by_split("emoji", report.track(pictures(home), "drawing", 5673))
    held_out = {"style": TEST_STYLE, "concepts": "one in ten, by the MD5 of the name (ernie5.corpora.splits)"}
    return write_corpus(folder, "emoji", shards, LICENCES, held_out)
