"""The modalities the unified vocabulary knows and the service that tokenises each.

Three layouts of token groups carry every modality (see :mod:`ernie5.protocol.tokens`), so a new one
needs a tokenizer and an entry here, and nothing in the backbone. A distribution of somebody else adds its
modalities through the entry point group :data:`PLUGIN_GROUP`; the name of the entry point is the modality's,
and what it loads has a ``modality`` attribute (:mod:`ernie5.tokenizers.modalities` says what else).
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

LayoutKind = Literal["sequence", "scales", "codebooks"]
ServiceName = Literal["text", "audio", "vision"]

PLUGIN_GROUP = "ernie_multi.modalities"
# Pairs of marker ids that plug-ins share out among themselves.
PLUGIN_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Modality:
    """A modality: its name, the token layout it uses and the service that tokenises it.

    ``slot`` is for plug-ins only: which of the :data:`PLUGIN_SLOTS` pairs of begin and end markers it takes.
    Without one its media can be tokenised, but not be part of a model's samples.
    """

    name: str
    layout: LayoutKind
    service: ServiceName
    slot: int | None = None


# The order fixes marker ids; append only.
MODALITIES: dict[str, Modality] = {
    modality.name: modality
    for modality in (
        Modality("text", "sequence", "text"),
        Modality("code", "sequence", "text"),
        Modality("image", "scales", "vision"),
        Modality("video", "scales", "vision"),
        Modality("speech", "codebooks", "audio"),
        Modality("sound", "codebooks", "audio"),
        Modality("depth", "scales", "vision"),
        Modality("series", "codebooks", "audio"),
        Modality("table", "sequence", "text"),
        Modality("points", "scales", "vision"),
        Modality("boxes", "sequence", "text"),
        Modality("sketch", "scales", "vision"),
        Modality("molecule", "sequence", "text"),
        Modality("track", "sequence", "text"),
        Modality("strokes", "sequence", "text"),
        Modality("protein", "sequence", "text"),
    )
}


def modality_of(name: str) -> Modality:
    """The modality called ``name``, of this package or of an installed plug-in.

    Raises:
        ValueError: no such modality (the message lists the known names), or its plug-in is broken.
    """
    known = MODALITIES.get(name)
    if known is not None:
        return known
    if name in plugins():
        return load_plugin(name)[0]
    raise ValueError(f"unknown modality {name!r}; known: {', '.join([*MODALITIES, *plugins()])}")


@lru_cache(maxsize=1)
def plugins() -> dict[str, tuple[importlib.metadata.EntryPoint, ...]]:
    """Entry points of installed plug-ins by name, nothing of them loaded yet; read once a process.

    ``plugins.cache_clear()`` reads them again.
    """
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        found.setdefault(entry.name, []).append(entry)
    return {name: tuple(entries) for name, entries in sorted(found.items())}


def load_plugin(name: str) -> tuple[Modality, Any]:
    """A plug-in's modality and what its entry point names.

    Raises:
        ValueError: it can't be imported, two distributions claim the name, or its ``modality`` is missing,
        bears
            another name, takes a built-in one's name or a slot outside the range; the message names the entry
            point.
    """
    entry, *others = plugins()[name]
    where = f"modality plug-in {name!r} ({entry.value})"
    if name in MODALITIES:
        raise ValueError(f"{where} has the name of a modality of ernie-multi; give it another")
    if others:
        clash = ", ".join(other.value for other in others)
        raise ValueError(f"{where} is also offered as {clash}; uninstall one of the distributions")
    try:
        loaded = entry.load()
    except Exception as error:
        raise ValueError(f"{where} can't be imported: {type(error).__name__}: {error}") from error
    modality = getattr(loaded, "modality", None)
    if not isinstance(modality, Modality) or modality.name != name:
        raise ValueError(f"{where} needs an attribute `modality` with the name {name!r}, got {modality!r}")
    if modality.layout not in ("sequence", "scales", "codebooks") or modality.service not in (
        "text",
        "audio",
        "vision",
    ):
        raise ValueError(f"{where} names no known layout and service: {modality!r}")
    if modality.slot is not None and not 0 <= modality.slot < PLUGIN_SLOTS:
        raise ValueError(f"{where} wants marker slot {modality.slot}; there are 0 to {PLUGIN_SLOTS - 1}")
    return modality, loaded


def plugin_slots() -> dict[int, str]:
    """Marker slots that working plug-ins take.

    Raises:
        ValueError: two of them want one slot, so that a model couldn't tell them apart.
    """
    taken: dict[int, str] = {}
    for name in plugins():
        try:
            slot = load_plugin(name)[0].slot
        except ValueError:
            continue  # a broken plug-in is reported where it is used or listed
        if slot is None:
            continue
        if slot in taken:
            raise ValueError(
                f"modality plug-ins {taken[slot]!r} and {name!r} both want marker slot {slot}; "
                "uninstall one of them, or have one declare another slot"
            )
        taken[slot] = name
    return taken
