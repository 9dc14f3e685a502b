"""Imports put off until a command runs: ``--help`` answers at once, and `service text` needs no torch."""

from __future__ import annotations

import importlib
from typing import Any


def function(module: str, name: str) -> Any:
    """The function ``name`` of ``module``."""
    return getattr(importlib.import_module(module), name)
