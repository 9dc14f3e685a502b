"""Colour palettes, one ``#rrggbb`` a line, as a modality of a third party."""

from __future__ import annotations

import re
from pathlib import Path

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError
from ernie5.protocol.modalities import Modality
from ernie5.tokenizers.modalities import Figure, SampleFile, TextCodec

Palette = tuple[str, ...]


class PaletteCodec(TextCodec[Palette]):
    """Colours in order, exact."""

    modality = Modality("palette", "sequence", "text", slot=0)
    content_types = ("text/x-palette",)
    promise = "every colour exact"
    sample = SampleFile(
        Path(__file__).parent / "tableau.txt", "text/x-palette", "colours of a chart, typed in", "a fact"
    )

    def read(self, data: bytes, content_type: str) -> Palette:
        colours = tuple(data.decode("ascii", "replace").lower().split())
        if not colours or not all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours):
            raise InvalidMediaError("a palette holds colours such as #1f77b4", param="data")
        return colours

    def write(self, value: Palette, content_type: str) -> bytes:
        return ("\n".join(value) + "\n").encode()

    def to_text(self, value: Palette) -> str:
        return " ".join(value)

    def from_text(self, text: str) -> Palette:
        try:
            return self.read(text.encode(), self.content_types[0])
        except InvalidMediaError as error:
            raise InvalidInputError(error.message, param="codes") from None

    def compare(self, original: Palette, decoded: Palette) -> Figure:
        return Figure("palettes that differ", float(original != decoded), "", 0)
