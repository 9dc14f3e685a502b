"""Text from the packages: English verses, Chinese poems and sayings, Python source."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ernie5.corpora.builders.packages import require_tool, unpack

_COLOURS = re.compile("\x1b\\[[0-9;]*m")


def verses() -> list[tuple[str, str]]:
    """The 31,102 verses of the King James Version: (reference such as ``Gen1:1``, text)."""
    command = [require_tool("bible"), "-f", "Gen1:1-Rev22:21"]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    return [(reference, text) for reference, _, text in (line.partition(" ") for line in lines) if text]


def poems(home: Path, collection: str = "quantangshi") -> Iterator[tuple[str, str]]:
    """Chinese poems as (author and title, lines).

    Args:
        home: the data home.
        collection: a folder of the package: ``quantangshi`` (Tang, traditional characters), ``songci``
            (Song lyrics, simplified), ``shijing`` (Book of Songs, simplified).
    """
    root = unpack("poems", home, (f"dist/{collection}/",)) / "dist" / collection
    for file in sorted(root.rglob("*.json")):
        content = json.loads(file.read_text("utf-8"))
        for poem in content if isinstance(content, list) else []:
            lines = poem.get("paragraphs") or poem.get("content")
            if isinstance(lines, list) and lines:
                title = f"{poem.get('author', '')} {poem.get('title') or poem.get('rhythmic', '')}"
                yield title.strip(), "\n".join(lines)


def sayings(home: Path) -> Iterator[str]:
    """Chinese fortunes: poems and sayings in simplified characters."""
    folder = unpack("fortunes-zh", home) / "usr" / "share" / "games" / "fortunes"
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.is_symlink() and file.suffix not in (".dat", ".u8"):
            for saying in _COLOURS.sub("", file.read_text("utf-8", errors="ignore")).split("\n%\n"):
                if saying.strip():
                    yield saying.strip()


def python_files() -> Iterator[Path]:
    """Modules of the running interpreter's standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "encodings",
        "pydoc_data",
        "lib2to3",
    }
    for path in sorted(root.rglob("*.py")):
        if not skipped & set(path.relative_to(root).parts):
            yield path


def python_functions(longest: int = 600) -> Iterator[tuple[str, str]]:
    """Documented functions of at most ``longest`` characters: (``module.function``, source)."""
    for path in python_files():
        source = path.read_text("utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                text = ast.get_source_segment(source, node)
                if text and 120 <= len(text) <= longest:
                    yield f"{path.stem}.{node.name}", text
