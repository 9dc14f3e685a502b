"""Imports run downward only, and the top folders never shadow the distributions whose names they share.

A layer that may import upward can't be put into a small container (the text tokenizer and the gateway
need no torch), and ``tokenizers/__init__.py`` would hide Hugging Face's package from transformers.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAPPED = ("protocol", "kernels", "corpora", "tokenizers", "backbone", "services")

# What each folder may import besides itself.
BELOW: dict[str, frozenset[str]] = {
    "protocol": frozenset(),
    "kernels": frozenset({"protocol"}),
    "corpora": frozenset({"protocol", "kernels"}),
    "tokenizers": frozenset({"protocol", "kernels"}),
    "backbone": frozenset({"protocol", "kernels"}),
    "services": frozenset({"protocol", "kernels", "corpora", "tokenizers", "backbone"}),
    "ernie_multi": frozenset(MAPPED),
}
# The only third-party packages of the ground layer; yaml is imported where a settings file is read.
PROTOCOL_DEPENDENCIES = {"numpy", "pydantic", "pydantic_core", "yaml"}


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, those inside functions too; relative ones as ``.``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module == "ernie5":
                for alias in node.names:
                    yield node.lineno, f"ernie5.{alias.name}"
            else:
                yield node.lineno, node.module or ""


def layer_of(module: str) -> str | None:
    """The folder that an absolute module name of this project lies in, else None."""
    parts = module.split(".")
    if parts[0] == "ernie5" and len(parts) > 1:
        return parts[1]
    return "ernie_multi" if parts[0] == "ernie_multi" else None


def violations(folder: str, source: str, *, name: str = "<source>") -> list[str]:
    """Imports of ``source``, a file of ``folder``, that the layers forbid."""
    found = []
    for line, module in imported_modules(source):
        where = f"{name}:{line}: {folder} imports {module}"
        target = layer_of(module)
        if module.startswith("."):
            found.append(f"{where}; import absolutely, from ernie5.…")
        elif module.split(".")[0] in MAPPED and module.split(".")[0] != "tokenizers":
            found.append(f"{where}; the installed name is ernie5.{module}")
        elif target is not None and target != folder and target not in BELOW[folder]:
            found.append(f"{where}; allowed: {', '.join(sorted(BELOW[folder])) or 'nothing'}")
        elif folder == "protocol" and target is None:
            top = module.split(".")[0]
            if top not in sys.stdlib_module_names and top not in PROTOCOL_DEPENDENCIES:
                found.append(f"{where}; protocol needs numpy and pydantic only")
    return found


@pytest.mark.parametrize("folder", BELOW)
def test_imports_run_downward(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        found += violations(folder, path.read_text("utf-8"), name=str(path.relative_to(ROOT)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("kernels", "from ernie5.backbone.model import attention"),
        ("tokenizers", "def late():\n    from ernie5.backbone import layout"),
        ("corpora", "from ernie5 import tokenizers"),
        ("backbone", "import ernie5.services.streams"),
        ("services", "from ernie_multi.client import ErnieMulti"),
        ("protocol", "import torch"),
        ("services", "from protocol.tokens import TokenSpan"),
        ("services", "from .streams import Stream"),
    ],
)
def test_a_forbidden_import_is_seen(folder: str, source: str) -> None:
    assert violations(folder, source)


@pytest.mark.parametrize("folder", MAPPED)
def test_mapped_folders_are_no_packages_at_the_top(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), (
        f"{folder}/__init__.py would shadow distributions of that name from the repository's root"
    )
    assert (ROOT / folder / "py.typed").exists()
    assert (ROOT / ".typing" / "ernie5" / folder).resolve() == ROOT / folder


def test_hugging_face_tokenizers_stay_themselves_from_the_root() -> None:
    try:
        importlib.metadata.version("tokenizers")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Hugging Face's tokenizers are not installed")
    code = "import tokenizers; print(tokenizers.Tokenizer.__module__, tokenizers.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(ROOT / "tokenizers") not in done.stdout


@pytest.mark.parametrize("folder", MAPPED)
def test_the_installed_package_is_this_tree(folder: str) -> None:
    spec = importlib.util.find_spec(f"ernie5.{folder}")
    assert spec is not None and spec.submodule_search_locations is not None
    assert ROOT / folder in [Path(place).resolve() for place in spec.submodule_search_locations]
