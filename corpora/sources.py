"""Places items come from: a folder of shards, a plain folder of media. Each lists its items for one split.

A source knows how many items it has, the kind of each, and reads one by number. What can't be read raises
:class:`~ernie5.protocol.errors.InvalidInputError` when it is read, not when the corpus is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ernie5.corpora.items import Item, is_payload, item_from_files, kind_of
from ernie5.corpora.webdataset import MAX_MEMBER, Shard, split_name
from ernie5.protocol.errors import InvalidInputError

TEST_WORDS = frozenset({"test", "val", "valid", "validation", "eval", "dev"})
"""Words in a shard's or folder's name that put it into the test split."""
BROKEN = "broken"
"""Kind of an item whose metadata can't be read or that has no medium."""
SHARD_SUFFIXES = (".tar", ".tar.zst")


class Source(Protocol):
    """Items of one split, by number."""

    def __len__(self) -> int: ...

    def kinds(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Kind and metadata of every item, in order; an unreadable one has kind :data:`BROKEN`."""
        ...

    def item(self, number: int) -> Item:
        """Read an item; `InvalidInputError` names the place of one that is unreadable."""
        ...

    def fingerprint(self) -> str:
        """Hash of what the source holds, hex."""
        ...


def split_of(name: str) -> str:
    """``test`` where a word of the name says so, else ``train``.

    >>> split_of("shards/emoji-test-0001.tar")
    'test'
    """
    words = name.lower().replace("/", "-").replace("_", "-").replace(".", "-").split("-")
    return "test" if TEST_WORDS & set(words) else "train"


def is_shard(path: Path) -> bool:
    """Whether a file is a shard, by its name."""
    return path.name.endswith(SHARD_SUFFIXES)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """``manifest.json`` of a built corpus, or ``None`` where there is none.

    Raises:
        InvalidInputError: it is not JSON, or lists no shards; the message has file and line.
    """
    path = folder / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} can't be read ({error})") from None
    shards = manifest.get("shards") if isinstance(manifest, dict) else None
    good = isinstance(shards, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("file"), str) and isinstance(entry.get("split"), str)
        for entry in shards
    )
    if not good:
        raise InvalidInputError(f"{path}: 'shards' must be a list of objects with 'file' and 'split'")
    return manifest


def inside(folder: Path, name: str, where: str) -> Path:
    """``folder/name``, with links followed, if it lies inside ``folder``.

    Raises:
        InvalidInputError: it leads out of the folder, or ``name`` is a URL or holds a NUL.
    """
    if "://" in name or "\0" in name:
        raise InvalidInputError(f"{where}: {name!r} is not a path inside {folder}; nothing is fetched")
    root = folder.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise InvalidInputError(f"{where}: {name!r} leads out of {folder}; paths stay inside it")
    return path


def read_medium(path: Path, where: str) -> bytes:
    """A file's bytes, at most ``MAX_MEMBER``; `InvalidInputError` names ``where`` it was referred to."""
    try:
        size = path.stat().st_size
        if size > MAX_MEMBER:
            raise InvalidInputError(f"{where}: {path} has {size} bytes; at most {MAX_MEMBER} are read")
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{where}: {path} can't be read ({error.strerror})") from None


def _kind_and_metadata(extensions: set[str], read: Callable[[], bytes] | None) -> tuple[str, dict[str, Any]]:
    """Kind and metadata of an item, ``broken`` and nothing where they can't be told."""
    kind: Any = kind_of(extensions) if any(map(is_payload, extensions)) else BROKEN
    metadata: Any = {}
    if read is not None:
        try:
            metadata = json.loads(read())
        except (ValueError, RecursionError):
            return BROKEN, {}
        if not isinstance(metadata, dict) or not isinstance(metadata.get("names", {}), dict):
            return BROKEN, {}
        kind = metadata.get("kind", kind)
    return (kind, metadata) if isinstance(kind, str) else (BROKEN, {})


class ShardSource:
    """Items in WebDataset shards: a built corpus with its manifest, or a foreign folder, or single shards."""

    def __init__(self, shards: list[Path], identity: str) -> None:
        self.shards = [Shard(path) for path in shards]
        self.places = [(shard, item_id) for shard in self.shards for item_id in shard.items]
        self._identity = identity

    @classmethod
    def from_folder(cls, folder: Path, split: str) -> ShardSource:
        """The shards of a folder that belong to ``split``, by its manifest or else by their names."""
        manifest = read_manifest(folder)
        if manifest is not None:
            where = str(folder / "manifest.json")
            shards = [
                inside(folder, entry["file"], where)
                for entry in manifest["shards"]
                if entry["split"] == split
            ]
            identity = json.dumps(manifest["shards"], sort_keys=True)
        else:
            every = sorted(path for path in folder.rglob("*") if is_shard(path))
            shards = [path for path in every if split_of(path.relative_to(folder).as_posix()) == split]
            identity = _listing(folder, every)
        return cls(shards, f"{identity}|{split}")

    @classmethod
    def from_file(cls, path: Path, split: str) -> ShardSource:
        """One shard; its name tells its split."""
        shards = [path] if split_of(path.name) == split else []
        return cls(shards, f"{_listing(path.parent, [path])}|{split}")

    def __len__(self) -> int:
        return len(self.places)

    def kinds(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for shard, item_id in self.places:
            members = shard.items[item_id]
            member = members.get("json")
            yield _kind_and_metadata(set(members), partial(shard.read, member) if member else None)

    def item(self, number: int) -> Item:
        shard, item_id = self.places[number]
        files = {extension: shard.read(member) for extension, member in shard.items[item_id].items()}
        return item_from_files(item_id, files, f"{shard.path}, item {item_id}")

    def fingerprint(self) -> str:
        return hashlib.sha256(self._identity.encode()).hexdigest()


class FolderSource:
    """A plain folder: files of one name in one folder are an item (``cat.jpg`` with ``cat.txt``).

    Hidden files and links that lead out are left out. Sub-folders named ``test``, ``val`` … are for testing.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        root = folder.resolve()
        groups: dict[str, dict[str, Path]] = {}
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            if hidden or not path.is_file() or not path.resolve().is_relative_to(root):
                continue
            item_id, extension = split_name(relative.as_posix())
            if (is_payload(extension) or extension == "json") and split_of(str(relative.parent)) == split:
                groups.setdefault(item_id, {})[extension] = path
        self.groups = [
            (item_id, files) for item_id, files in groups.items() if any(is_payload(name) for name in files)
        ]
        self._identity = _listing(folder, [path for _, files in self.groups for path in files.values()])

    def __len__(self) -> int:
        return len(self.groups)

    def kinds(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for item_id, files in self.groups:
            path = files.get("json")
            yield _kind_and_metadata(set(files), partial(read_medium, path, item_id) if path else None)

    def item(self, number: int) -> Item:
        item_id, files = self.groups[number]
        where = f"{self.folder}, item {item_id}"
        return item_from_files(
            item_id, {name: read_medium(path, where) for name, path in files.items()}, where
        )

    def fingerprint(self) -> str:
        return hashlib.sha256(self._identity.encode()).hexdigest()


def _listing(folder: Path, paths: list[Path]) -> str:
    """Names, sizes and times of files: the identity of what has no manifest."""
    return json.dumps(
        [
            (path.relative_to(folder).as_posix(), (stat := path.stat()).st_size, stat.st_mtime_ns)
            for path in paths
        ]
    )
