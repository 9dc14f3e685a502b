"""What recipes say: figures, and the command that a card of weights records."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def show(figures: object, out: Path | None) -> None:
    """Print figures as JSON and, where ``out`` is given, write them there too."""
    text = json.dumps(figures, indent=2, ensure_ascii=False)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", "utf-8")


def command_line(program: str, arguments: Sequence[str] | None) -> str:
    """``program`` with ``arguments`` (this process's if None), as a card records it.

    Of a path only the last part is kept: where the folders of one machine lie tells others nothing.
    """
    return " ".join([program, *(shlex.quote(_portable(value)) for value in arguments or sys.argv[1:])])


def _portable(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    return option + equals + (Path(value).name or value)
