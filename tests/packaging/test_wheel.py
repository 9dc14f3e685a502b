"""The wheel holds every module and data file of the tree; setup.py finds them by a walk, not from a list."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_AS = {
    "ernie_multi": "ernie_multi",
    **{
        folder: f"ernie5/{folder}"
        for folder in ("protocol", "kernels", "corpora", "tokenizers", "backbone", "services")
    },
}


def shipped_files(root: Path) -> set[str]:
    """Paths in the wheel of all files of the mapped folders."""
    found = set()
    for folder, installed in INSTALLED_AS.items():
        for path in (root / folder).rglob("*"):
            parts = path.relative_to(root / folder).parts
            if (
                path.is_file()
                and path.suffix != ".so"
                and not any(p.startswith((".", "__pyc")) for p in parts)
            ):
                found.add(f"{installed}/{'/'.join(parts)}")
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources (building writes beside them), with a new sub-package and a new data file."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in INSTALLED_AS:
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.so")
        )
    added = copy / "tokenizers" / "added_today"
    (added / "weights").mkdir(parents=True)
    (added / "__init__.py").write_text("ADDED = 1\n")
    (added / "weights" / "tiny.safetensors").write_bytes(b"\0" * 8)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("*.whl"))


def test_the_wheel_holds_the_whole_tree(tree: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == shipped_files(tree)
    assert "ernie5/tokenizers/added_today/weights/tiny.safetensors" in held


def test_the_installed_wheel_imports_and_leaves_top_names_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # -I leaves out the working folder and PYTHONPATH; the editable install's finder would answer first.
    code = """
import importlib.util, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
sys.path.insert(0, sys.argv[1])
import ernie_multi
from ernie5.protocol.tokens import TokenSpan
from ernie5.tokenizers.added_today import ADDED
assert ernie_multi.__file__.startswith(sys.argv[1]), ernie_multi.__file__
for name in ("tokenizers", "kernels", "protocol", "services"):
    assert sys.argv[1] not in str(importlib.util.find_spec(name)), name
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_wheel_can_bring_the_kernels_compiled(tree: Path, tmp_path: Path) -> None:
    """As the container images have it: no compiler is there when the wheel is used."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels with")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
    ]
    environment = {**os.environ, "ERNIE_MULTI_PREBUILD": "1", "CXX": "g++"}
    done = subprocess.run([*command, str(tree)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (made,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in made.name
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tmp_path / "installed")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from ernie5.kernels.native import build
assert build.built(build.best_variant()).parent.name == "prebuilt"
assert build.library().flashmask_attention_size() > 0
"""
    command = [sys.executable, "-IS", "-c", code, str(tmp_path / "installed")]
    environment = {"CXX": "none", "PATH": "", "ERNIE_MULTI_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_every_folder_with_code_is_a_package() -> None:
    bare = sorted(
        str(path.parent.relative_to(ROOT))
        for folder in INSTALLED_AS
        for path in (ROOT / folder).rglob("*.py")
        if path.parent != ROOT / folder and not (path.parent / "__init__.py").exists()
    )
    assert not bare, f"no __init__.py in {bare}: the wheel would miss them"
