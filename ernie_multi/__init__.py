"""ernie-multi: one model that understands and generates text, images, audio and video."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ernie_multi.client import ErnieMulti, Prediction

__version__ = "0.1.0"
__all__ = ["ErnieMulti", "Prediction", "__version__"]


def __getattr__(name: str) -> Any:
    # On first use, so that the command and the small images don't import what only the client needs.
    if name in ("ErnieMulti", "Prediction"):
        return getattr(importlib.import_module("ernie_multi.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
