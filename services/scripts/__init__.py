"""Server-side Lua scripts: each runs atomically; all share ``common.lua``.

A script takes no declared keys: names of samples and cached spans follow from its arguments, and the stream
needs one primary anyway. ``flags=allow-oom`` lets the scripts that free memory run on a full server.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent


@cache
def source(name: str, *, allow_oom: bool) -> str:
    """The text of ``name``.lua behind the shared part."""
    head = "#!lua flags=allow-oom\n" if allow_oom else "#!lua\n"
    parts = [(_FOLDER / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name)]
    return head + "\n".join(parts)
