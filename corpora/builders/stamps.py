"""Captioned cut-out pictures with spoken captions and the sounds the things make, in many languages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import BuiltItem, by_split, write_corpus
from ernie5.corpora.builders.pictures import Stamp, fit_on_white, open_picture, png, stamps
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.builders.voices import SAMPLE_RATE, cut_to_speech, opus, read_recording
from ernie5.corpora.splits import is_held_out

SIDE = 128
LONGEST = {"spoken_word": 6.0, "named_sound": 8.0}
"""Seconds; longer recordings are left out."""


def _clip(path: Path, kind: str) -> tuple[bytes, float] | None:
    try:
        clip = cut_to_speech(read_recording(path))
    except (ValueError, RuntimeError):  # silent, or not decodable
        return None
    seconds = len(clip) / SAMPLE_RATE
    return (opus(clip), seconds) if 0.1 <= seconds <= LONGEST[kind] else None


def _items(stamp: Stamp) -> list[BuiltItem]:
    """A stamp's picture, its spoken captions whose words are known, and its sound, each an item."""
    caption, stem = stamp.captions["en"], stamp.name.replace(".", "-")
    made = [
        BuiltItem(
            f"picture/{stem}",
            "captioned_picture",
            {"png": png(fit_on_white(open_picture(stamp.picture), SIDE))},
            {"label": caption, "names": stamp.captions, "source": "stamps"},
        )
    ]
    for language, path in stamp.speech.items():
        words = stamp.captions.get(language)
        clip = _clip(path, "spoken_word") if words else None
        if clip:
            metadata = {
                "label": words,
                "language": language,
                "voice": f"stamps-{language}",
                "human": True,
                "seconds": round(clip[1], 3),
                "concept": caption,
                "source": "stamps",
            }
            made.append(BuiltItem(f"speech/{stem}-{language}", "spoken_word", {"ogg": clip[0]}, metadata))
    # Recordings among the symbols are mostly spoken names, not sounds.
    if stamp.sound and not stamp.name.startswith("symbols/") and (clip := _clip(stamp.sound, "named_sound")):
        metadata = {"label": caption, "seconds": round(clip[1], 3), "source": "stamps"}
        made.append(BuiltItem(f"sound/{stem}", "named_sound", {"ogg": clip[0]}, metadata))
    return made


def items(home: Path, report: Report, workers: int = 2) -> Iterator[tuple[str, BuiltItem]]:
    """(split, item): everything about a concept falls into one split, by its English caption.

    Files that occur more than once (alphabets are drawn twice and share recordings) are kept once.
    """
    seen: set[tuple[str, str]] = set()
    every = list(stamps(home))
    with ProcessPoolExecutor(workers) as pool:
        for made in report.track(pool.map(_items, every, chunksize=8), "stamps", len(every)):
            for item in made:
                digest = hashlib.sha256(b"".join(item.files.values())).hexdigest()
                if (item.kind, digest) in seen:
                    continue
                seen.add((item.kind, digest))
                concept = item.metadata.get("concept", item.metadata["label"])
                yield ("test" if is_held_out(concept) else "train"), item


def build_stamps(folder: Path, home: Path, report: Report) -> dict[str, Any]:
    """Write the corpus to ``folder``; returns its manifest."""
    shards = by_split("stamps", items(home, report))
    held_out = {"concepts": "one in ten, by the MD5 of the English caption (ernie5.corpora.splits)"}
    return write_corpus(folder, "stamps", shards, LICENCES, held_out)
