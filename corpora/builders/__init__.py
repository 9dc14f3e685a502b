"""Builders of the corpora, from packages fetched by their own clients.

``build("emoji")`` leaves a corpus that ``open_corpus("emoji")`` finds. A finished corpus and intact packages
are kept, so a second call does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ernie5.corpora.corpus import data_home
from ernie5.corpora.sources import read_manifest
from ernie5.corpora.webdataset import file_digest
from ernie5.protocol.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.progress import Progress

BUILDERS: dict[str, str] = {
    "mini": "the corpus that ships: digits, 300 emoji, spoken words, a little text (7 MB)",
    "digits": "10,000 handwritten digits and about 7,000 spoken ones in six languages (80 MB to fetch)",
    "emoji": "1,900 emoji in three drawing styles, named in twelve languages (90 MB to fetch)",
    "stamps": "950 captioned pictures, 7,000 spoken captions, 100 sounds (160 MB to fetch; GPL-2)",
    "motion": "187 animated emoji with English and Chinese names (165 MB to fetch)",
    "speech": "emoji names, verses and poems spoken by many voices in six languages",
    "sounds": "5,000 recordings in 30 languages, 6,000 synthetic clips, music (160 MB to fetch; parts GPL-2)",
    "text": "English verses, Chinese poems and sayings, Python source (90 MB to fetch)",
}
"""Corpus name to what it holds."""


def build(
    name: str, home: Path | None = None, progress: Progress | None = None, *, folder: Path | None = None
) -> Path:
    """Build a corpus unless it is there, whole, already.

    Args:
        name: a key of :data:`BUILDERS`.
        home: data home; ``ERNIE_MULTI_DATA`` or ``~/.cache/ernie-multi`` where ``None``. Packages are kept in
            ``home/packages``, corpora in ``home/corpora``.
        progress: bars to draw on (see :func:`.progress.progress_bars`); silent without.
        folder: write there instead of ``home/corpora/name``.

    Returns:
        The corpus's folder.

    Raises:
        InvalidInputError: no builder of that name.
        UnavailableError: a client or tool is missing (the message names the package to install), or a
            package can't be fetched or fails its checksum.
    """
    if name not in BUILDERS:
        raise InvalidInputError(
            f"no builder for corpus {name!r}; there are {', '.join(BUILDERS)}", param="name"
        )
    from ernie5.corpora.builders.progress import Report

    home = home or data_home()
    folder = folder or home / "corpora" / name
    report = Report(progress, name)
    if is_complete(folder):
        report.say(f"{folder} is complete; nothing to do")
        return folder
    manifest = _builder(name)(folder, home, report)
    size = sum(entry["bytes"] for entry in manifest["shards"])
    report.say(
        f"{sum(entry['items'] for entry in manifest['shards'])} items, {size / 1e6:.1f} MB in {folder}"
    )
    return folder


def is_complete(folder: Path) -> bool:
    """Whether a folder has a manifest and every shard with the hash it names."""
    try:
        manifest = read_manifest(folder)
    except InvalidInputError:
        return False
    if manifest is None:
        return False
    return all(
        (path := folder / entry["file"]).is_file() and file_digest(path) == entry.get("sha256")
        for entry in manifest["shards"]
    )


def _builder(name: str) -> Callable[[Path, Path, Any], dict[str, Any]]:
    # Each builder imports its libraries only when it is asked for.
    if name == "mini":
        from ernie5.corpora.builders.mini import build_mini as chosen
    elif name == "digits":
        from ernie5.corpora.builders.digits import build_digits as chosen
    elif name == "emoji":
        from ernie5.corpora.builders.emoji import build_emoji as chosen
    elif name == "stamps":
        from ernie5.corpora.builders.stamps import build_stamps as chosen
    elif name == "motion":
        from ernie5.corpora.builders.motion import build_motion as chosen
    elif name == "speech":
        from ernie5.corpora.builders.speech import build_speech as chosen
    elif name == "sounds":
        from ernie5.corpora.builders.sounds import build_sounds as chosen
    else:
        from ernie5.corpora.builders.text import build_text as chosen
    return chosen
