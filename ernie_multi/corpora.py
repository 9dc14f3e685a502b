"""What `ernie-multi corpus build` and `corpus list` do: builders with progress, a table of what there is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ernie5.protocol.errors import InvalidInputError


def build(name: str, out: Path | None) -> None:
    """Build a corpus unless it is there, and print its folder.

    ``hostile`` fetches the malformed files that the tokenizers' slow tests read, which are no corpus.
    """
    from ernie5.corpora.builders import build as build_corpus
    from ernie5.corpora.builders import hostile
    from ernie5.corpora.builders.progress import Report, progress_bars

    with progress_bars() as progress:
        if name == hostile.NAME:
            if out is not None:
                raise InvalidInputError("hostile files lie in the data home; leave --out out", param="out")
            print(hostile.build_hostile(report=Report(progress, name)))
            return
        folder = build_corpus(name, progress=progress, folder=out)
    print(folder)


def show() -> None:
    """Print each corpus that ships, is built, or can be built."""
    from ernie5.corpora.builders import BUILDERS
    from ernie5.corpora.corpus import SPLITS, corpus_names, open_corpus

    here = corpus_names()
    table = Table("corpus", *(f"{split} samples" for split in SPLITS), "what it holds")
    for name in [*here, *(name for name in BUILDERS if name not in here)]:
        counts = [str(len(open_corpus(name, split))) if name in here else "–" for split in SPLITS]
        table.add_row(name, *counts, BUILDERS.get(name, ""))
    Console().print(table)
    if missing := [name for name in BUILDERS if name not in here]:
        print(f"not built yet: {', '.join(missing)}; build one with `ernie-multi corpus build NAME`")
