"""Named animations: 187 emoji that move, for video tokenizers and captions of clips."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import BuiltItem, by_split, write_corpus
from ernie5.corpora.builders.packages import unpack
from ernie5.corpora.builders.pictures import emoji_names
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.splits import is_held_out

SIDE = 96
FRAME_MILLISECONDS = 84
"""Of a frame kept: every second one of the package's animations, which show 24 a second."""


def animations(home: Path) -> list[tuple[str, Path]]:
    """(code, file) of the emoji whose file moves, in the order of their codes; skin tones left out."""
    from PIL import Image

    folder = unpack("motion", home, ("assets/",)) / "assets"
    named = {emoji.code for emoji in emoji_names(home)}
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.webp")):
        code = "-".join(part.lstrip("0") for part in file.stem.lower().split("-") if part != "fe0f")
        if code not in named or code in found:
            continue
        with Image.open(file) as picture:
            if getattr(picture, "n_frames", 1) > 1:
                found[code] = file
    return sorted(found.items())


def animation(file: Path) -> tuple[bytes, int, float]:
    """A lossless animated WebP of 96x96 pixels on white, its number of frames and its seconds."""
    from PIL import Image

    frames = []
    with Image.open(file) as picture:
        for index in range(0, picture.n_frames, 2):  # type: ignore[attr-defined]
            picture.seek(index)
            over = Image.new("RGBA", picture.size, "white")
            over.alpha_composite(picture.convert("RGBA"))
            frames.append(over.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    buffer = io.BytesIO()
    frames[0].save(
        buffer,
        "WEBP",
        save_all=True,
        append_images=frames[1:],
        duration=FRAME_MILLISECONDS,
        loop=0,
        lossless=True,
        quality=60,
        method=4,
    )
    return buffer.getvalue(), len(frames), len(frames) * FRAME_MILLISECONDS / 1000


def clips(home: Path, report: Report, workers: int = 2) -> Iterator[tuple[str, BuiltItem]]:
    """(split, item) for each animation; one concept in ten is for the test split alone."""
    names = {emoji.code: emoji for emoji in emoji_names(home)}
    found = animations(home)
    with ProcessPoolExecutor(workers) as pool:
        made = report.track(pool.map(animation, [file for _, file in found]), "animations", len(found))
        for (code, _), (data, frames, seconds) in zip(found, made):
            emoji = names[code]
            metadata = {
                "label": emoji.names["en"],
                "names": emoji.names,
                "emoji": emoji.characters,
                "style": "fluent",
                "frames": frames,
                "seconds": round(seconds, 3),
                "source": "motion",
            }
            split = "test" if is_held_out(emoji.names["en"]) else "train"
            yield split, BuiltItem(f"motion-{code}", "named_clip", {"webp": data}, metadata)


def build_motion(folder: Path, home: Path, report: Report) -> dict[str, Any]:
    """Write the corpus to ``folder``; returns its manifest."""
    shards = by_split("motion", clips(home, report))
    held_out = {"concepts": "one in ten, by the MD5 of the English name (ernie5.corpora.splits)"}
    return write_corpus(folder, "motion", shards, LICENCES, held_out)
