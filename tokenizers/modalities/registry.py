"""All modalities: those of this package and those that installed plug-ins add.

A plug-in names a :class:`~ernie5.tokenizers.modalities.codec.Codec` class (or instance) in its own
``pyproject.toml``::

    [project.entry-points."ernie_multi.modalities"]
    palette = "my_package.palette:PaletteCodec"

The name is that of the codec's ``modality``, whose ``slot`` (0 to 7) gives it markers of its own in the
unified vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ernie5.protocol.modalities import load_plugin, plugins
from ernie5.tokenizers.modalities.boxes import BoxesCodec
from ernie5.tokenizers.modalities.codec import Codec, Figure
from ernie5.tokenizers.modalities.depth import DepthCodec
from ernie5.tokenizers.modalities.molecule import MoleculeCodec
from ernie5.tokenizers.modalities.points import PointsCodec
from ernie5.tokenizers.modalities.protein import ProteinCodec
from ernie5.tokenizers.modalities.series import SeriesCodec
from ernie5.tokenizers.modalities.shipped import (
    CodeCodec,
    ImageCodec,
    PlainTextCodec,
    SoundCodec,
    SpeechCodec,
    VideoCodec,
)
from ernie5.tokenizers.modalities.sketch import SketchCodec
from ernie5.tokenizers.modalities.strokes import StrokesCodec
from ernie5.tokenizers.modalities.table import TableCodec
from ernie5.tokenizers.modalities.track import TrackCodec

BUILT_IN: dict[str, Codec[Any]] = {
    codec.modality.name: codec
    for codec in (
        PlainTextCodec(),
        CodeCodec(),
        ImageCodec(),
        VideoCodec(),
        SpeechCodec(),
        SoundCodec(),
        DepthCodec(),
        SeriesCodec(),
        TableCodec(),
        PointsCodec(),
        BoxesCodec(),
        SketchCodec(),
        MoleculeCodec(),
        TrackCodec(),
        StrokesCodec(),
        ProteinCodec(),
    )
}


@dataclass(frozen=True, slots=True)
class Registry:
    """Codecs by the name of their modality; ``problems`` says why a plug-in of that name can't be used."""

    codecs: dict[str, Codec[Any]]
    problems: dict[str, str]

    def of_service(self, service: str) -> dict[str, Codec[Any]]:
        """The codecs of one service."""
        return {name: codec for name, codec in self.codecs.items() if codec.modality.service == service}


def load_registry() -> Registry:
    """The built-in codecs and those of the plug-ins that can be loaded; a broken one harms no other."""
    codecs, problems = dict(BUILT_IN), {}
    for name in plugins():
        try:
            codecs[name] = load_codec(name)
        except ValueError as error:
            problems[name] = str(error)
    return Registry(codecs, problems)


def load_codec(name: str) -> Codec[Any]:
    """The codec of a plug-in.

    Raises:
        ValueError: as :func:`~ernie5.protocol.modalities.load_plugin`, or what it names is no codec.
    """
    _, loaded = load_plugin(name)
    entry = plugins()[name][0].value
    try:
        codec = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:
        raise ValueError(f"modality plug-in {name!r} ({entry}) can't be made: {error}") from error
    if not isinstance(codec, Codec):
        raise ValueError(f"modality plug-in {name!r} ({entry}) is a {type(codec).__name__}, not a Codec")
    return codec


def round_trip(codec: Codec[Any], base: Any) -> Figure:
    """What the codec's sample file keeps: read, encoded, decoded, written, read again, compared.

    Raises:
        ErnieMultiError: the base can't take the modality.
    """
    data = codec.sample.path.read_bytes()
    original = codec.read_checked(data, codec.sample.content_type)
    decoded = codec.decode(codec.encode(original, base), base)
    written, content_type = codec.write_checked(decoded, codec.sample.content_type)
    again = codec.read_checked(written, content_type)
    return codec.compare(original, again)
