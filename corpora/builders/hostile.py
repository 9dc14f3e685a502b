"""Malformed and odd media files that exist for real, fetched for the tests of the tokenizers.

They are the test files of libraries that read media: pictures that crashed decoders, sounds with headers that
lie, one clip in twenty containers. They are no corpus, because nothing is to be learned from them, and under
terms (GPL-2 among them) that let tests fetch them but not this package ship them.
"""

from __future__ import annotations

import importlib.util
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ernie5.corpora.builders.packages import fetch
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.corpus import data_home
from ernie5.corpora.webdataset import file_digest
from ernie5.protocol.errors import InvalidInputError, UnavailableError

NAME = "hostile"
LIST = "files.json"
_LARGEST_FILE = 64 << 20


@dataclass(frozen=True, slots=True)
class HostileSet:
    """Files of one package.

    Attributes:
        package: short name in :data:`.packages.PACKAGES`; empty for the installed scipy.
        folder: the files' folder inside the package.
        licence: the package's.
    """

    package: str
    folder: str
    licence: str


SETS: dict[str, HostileSet] = {
    "pictures": HostileSet("hostile-pictures", "Tests/images", "MIT-CMU"),
    "sounds": HostileSet("hostile-sounds", "tests/data", "GPL-2.0-or-later"),
    "containers": HostileSet("hostile-containers", "iscc_samples/files", "CC-BY-4.0"),
    "wav": HostileSet("", "io/tests/data", "BSD-3-Clause"),
}
"""Name of a set to where its files come from."""


def build_hostile(home: Path | None = None, report: Report | None = None) -> Path:
    """Fetch and unpack all sets below ``home/hostile`` unless they are there, whole, already.

    Raises:
        UnavailableError: a package can't be fetched or fails its checksum, or scipy isn't installed.
    """
    home = home or data_home()
    report = report or Report(None, NAME)
    root = home / NAME
    if _is_complete(root):
        report.say(f"{root} is complete; nothing to do")
        return root
    digests: dict[str, dict[str, str]] = {}
    for name in SETS:
        digests[name] = {}
        for path, content in report.track(_contents(name, home), name):
            file = root / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            digests[name][path] = file_digest(file)
        if not digests[name]:
            raise UnavailableError(f"the package of {name!r} holds no files in {SETS[name].folder}")
    listed = {
        name: {"licence": SETS[name].licence, "files": files} for name, files in sorted(digests.items())
    }
    (root / LIST).write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n", "utf-8")
    report.say(f"{sum(map(len, digests.values()))} files in {root}")
    return root


def hostile_files(home: Path | None = None) -> dict[str, list[Path]]:
    """The fetched files of each set, sorted by name.

    Raises:
        InvalidInputError: they have not been fetched; the message has the command.
    """
    root = (home or data_home()) / NAME
    if not (root / LIST).is_file():
        raise InvalidInputError(f"no files in {root}; fetch them with `ernie-multi corpus build {NAME}`")
    listed = json.loads((root / LIST).read_text("utf-8"))
    return {name: [root / name / path for path in sorted(entry["files"])] for name, entry in listed.items()}


def _is_complete(root: Path) -> bool:
    if not (root / LIST).is_file():
        return False
    listed = json.loads((root / LIST).read_text("utf-8"))
    return set(listed) == set(SETS) and all(
        (root / name / path).is_file() and file_digest(root / name / path) == digest
        for name, entry in listed.items()
        for path, digest in entry["files"].items()
    )


def _contents(name: str, home: Path) -> Iterator[tuple[str, bytes]]:
    """(path below the set's folder, content) of each file."""
    source = SETS[name]
    if not source.package:
        spec = importlib.util.find_spec("scipy")
        if spec is None or spec.origin is None:
            raise UnavailableError("scipy is not installed: pip install 'ernie-multi[audio]'")
        for file in sorted((Path(spec.origin).parent / source.folder).glob("*.wav")):
            yield file.name, file.read_bytes()
        return
    with tarfile.open(fetch(source.package, home), "r:gz") as tar:
        for info in tar:
            parts = PurePosixPath(info.name).parts[1:]  # without the folder of name and version
            depth = len(PurePosixPath(source.folder).parts)
            inside = PurePosixPath(*parts[depth:]) if len(parts) > depth else None
            if inside is None or str(PurePosixPath(*parts[:depth])) != source.folder or ".." in parts:
                continue
            if info.isfile() and info.size <= _LARGEST_FILE and inside.suffix != ".py":
                stream = tar.extractfile(info)
                if stream is not None:
                    yield str(inside), stream.read()
