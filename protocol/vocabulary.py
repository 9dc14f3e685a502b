"""The unified vocabulary: text ids ``[0, V)``, then markers.

Markers open and close media, switch roles and end turns; one softmax ranges over text ids and markers
together, so the model itself decides when a picture or a sound begins (ERNIE 5.0 report, section 2.1).
Codes of media are not in this vocabulary: they have heads of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ernie5.protocol.grids import GRIDS
from ernie5.protocol.modalities import MODALITIES, PLUGIN_SLOTS, plugin_slots, plugins

# Each group has slots of its own, so that appending to one group never moves the ids of another.
_STRUCTURE = ("pad", "begin_sample", "context", "target", "end_turn", "separator")
_MODALITY_START, _GRID_START, MARKER_SLOTS = 16, 96, 160
# Plug-ins take the last pairs of the modalities' group, each the one that it declares.
_PLUGIN_START = _GRID_START - 2 * PLUGIN_SLOTS


def _marker_table() -> dict[str, int]:
    table = {name: slot for slot, name in enumerate(_STRUCTURE)}
    for index, name in enumerate(MODALITIES):
        table[f"begin_{name}"] = _MODALITY_START + 2 * index
        table[f"end_{name}"] = _MODALITY_START + 2 * index + 1
    for index, (height, width) in enumerate(GRIDS):
        table[f"grid_{height}x{width}"] = _GRID_START + index
    assert _MODALITY_START + 2 * len(MODALITIES) <= _PLUGIN_START
    assert _GRID_START + len(GRIDS) <= MARKER_SLOTS
    return table


MARKERS: dict[str, int] = _marker_table()
_NAMES = {slot: name for name, slot in MARKERS.items()}


@dataclass(frozen=True, slots=True)
class UnifiedVocabulary:
    """Ids of text pieces and markers.

    ``text_size`` is the text tokenizer's vocabulary V. ``size`` = V + 160 is the width of the text
    head and of the text embedding.
    """

    text_size: int

    @property
    def size(self) -> int:
        return self.text_size + MARKER_SLOTS

    def marker(self, name: str) -> int:
        """The id of a marker such as ``begin_image``; ``ValueError`` lists the known names."""
        slot = MARKERS.get(name)
        if slot is None:
            slot = _plugin_marker(name)
        return self.text_size + slot

    def marker_name(self, token: int) -> str | None:
        """The name of the marker with id ``token``, or None for text ids and reserved slots."""
        slot = token - self.text_size
        if _PLUGIN_START <= slot < _GRID_START:
            plugin = plugin_slots().get((slot - _PLUGIN_START) // 2)
            return plugin and f"{'end' if slot % 2 else 'begin'}_{plugin}"
        return _NAMES.get(slot)

    def is_text(self, token: int) -> bool:
        return 0 <= token < self.text_size


def _plugin_marker(name: str) -> int:
    side, _, modality = name.partition("_")
    if side in ("begin", "end") and modality in plugins():
        for slot, owner in plugin_slots().items():
            if owner == modality:
                return _PLUGIN_START + 2 * slot + (side == "end")
        raise ValueError(
            f"modality plug-in {modality!r} declares no marker slot, so models can't hold its media"
        )
    raise ValueError(f"unknown marker {name!r}; known: {', '.join(MARKERS)}")
