"""Writing a built corpus: shards, a manifest with hashes and counts, and the licences in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ernie5.corpora.webdataset import check_item_id, write_shard

FORMAT = 1
MIT_TERMS = """\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction, including
without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to the
following conditions: The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY
KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A
PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR
ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE."""
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Licence:
    """Terms of one source, as its package states them; its items carry ``source`` in their metadata."""

    source: str
    package: str
    licence: str
    attribution: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class BuiltItem:
    """An item to store: id, kind, files by extension, and metadata (``source`` among it)."""

    item_id: str
    kind: str
    files: Mapping[str, bytes]
    metadata: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_item_id(self.item_id)  # now, not when the shard is written after all the work

    def members(self) -> dict[str, bytes]:
        """The item's files with its metadata as ``json``."""
        record = {"kind": self.kind, **self.metadata}
        return {**self.files, "json": json.dumps(record, ensure_ascii=False, sort_keys=True).encode()}


def by_split(
    stem: str, items: Iterable[tuple[str, BuiltItem]], *, compress: bool = False
) -> dict[str, tuple[str, list[BuiltItem]]]:
    """(split, item) pairs as one shard a split, items in the order of their ids, for :func:`write_corpus`."""
    suffix = ".tar.zst" if compress else ".tar"
    kept: dict[str, list[BuiltItem]] = {"train": [], "test": []}
    for split, item in items:
        kept[split].append(item)
    return {
        f"{stem}-{split}{suffix}": (split, sorted(found, key=lambda item: item.item_id))
        for split, found in kept.items()
        if found
    }


def write_corpus(
    folder: Path,
    name: str,
    shards: Mapping[str, tuple[str, Iterable[BuiltItem]]],
    licences: Iterable[Licence],
    held_out: Mapping[str, Any],
    *,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write shards (file name to split and items), the manifest last, so that its presence means complete.

    Returns:
        The manifest as written to ``folder/manifest.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[str, Counter[str]] = {}
    sources: set[str] = set()
    entries = []
    for file, (split, items) in shards.items():
        kinds = counts.setdefault(split, Counter())

        def members(items: Iterable[BuiltItem] = items, kinds: Counter[str] = kinds) -> Any:
            for item in items:
                kinds[item.kind] += 1
                sources.add(str(item.metadata["source"]))
                yield item.item_id, item.members()

        summary = write_shard(folder / file, members())
        entries.append(
            {
                "file": file,
                "split": split,
                "items": summary.items,
                "bytes": summary.size,
                "sha256": summary.sha256,
                "content_sha256": summary.content_sha256,
            }
        )
    if any(kinds.get(named) for kinds in counts.values() for named in ("named_picture", "named_clip")):
        sources.add("names")
    named = [licence for licence in licences if licence.source in sources]
    missing = sources - {licence.source for licence in named}
    if missing:
        raise ValueError(f"corpus {name!r} has items without licence entry: {', '.join(sorted(missing))}")
    manifest = {
        "format": FORMAT,
        "name": name,
        "shards": entries,
        "kinds": {split: dict(sorted(kinds.items())) for split, kinds in counts.items()},
        "held_out": held_out,
        "licences": [asdict(licence) for licence in named],
        **(extra or {}),
    }
    (folder / "LICENCES.md").write_text(_licences_page(name, named), "utf-8")
    partial = folder / f".{MANIFEST}.part"
    partial.write_text(json.dumps(manifest, ensure_ascii=False, indent=1) + "\n", "utf-8")
    partial.replace(folder / MANIFEST)
    return manifest


def _licences_page(name: str, licences: list[Licence]) -> str:
    lines = [
        f"# Licences of the corpus `{name}`",
        "",
        "Each item names its source in its metadata (`source`). The terms are those stated in the packages "
        "the items were taken from; the items were cropped, scaled, resampled and re-encoded.",
        "",
    ]
    for entry in licences:
        lines += [
            f"## `{entry.source}`",
            "",
            f"* Taken from: {entry.package}",
            f"* Licence: {entry.licence}",
            f"* Attribution: {entry.attribution}",
        ]
        if entry.note:
            lines.append(f"* {entry.note}")
        lines.append("")
    if any("MIT" in entry.licence for entry in licences):
        lines += ["## The MIT licence", "", MIT_TERMS, ""]
    return "\n".join(lines)
