"""Items: what a corpus stores. An item is one thing with its media and names; tasks turn it into samples.

``kind`` tells which tasks fit (see :mod:`ernie5.corpora.tasks`). Items written by the builders carry it in
their ``.json`` member; items of a foreign WebDataset or folder get one from the files they come with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ernie5.protocol.errors import InvalidInputError

_IMAGE = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp", "gif": "gif", "bmp": "bmp"}
_VIDEO = {"mp4": "mp4", "webm": "webm", "mov": "quicktime", "mkv": "x-matroska", "avi": "x-msvideo"}
_AUDIO = {
    "wav": "wav",
    "flac": "flac",
    "ogg": "ogg",
    "opus": "ogg",
    "oga": "ogg",
    "mp3": "mpeg",
    "m4a": "mp4",
}
_CODE = {"py", "c", "h", "cpp", "cc", "rs", "go", "js", "ts", "java", "sh"}

MEDIA_TYPES: dict[str, tuple[str, str]] = {
    **{extension: ("image", f"image/{kind}") for extension, kind in _IMAGE.items()},
    **{extension: ("video", f"video/{kind}") for extension, kind in _VIDEO.items()},
    **{extension: ("sound", f"audio/{kind}") for extension, kind in _AUDIO.items()},
}
"""Extension to (modality, content type) for encoded media. Audio counts as sound until words come with it."""

TEXT_TYPES: dict[str, str] = {
    "txt": "text",
    "md": "text",
    **{extension: "code" for extension in _CODE},
}
"""Extension to modality for files of Unicode text."""


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of an item: its modality and either encoded bytes or text."""

    modality: str
    data: bytes | None = None
    text: str | None = None
    content_type: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One thing of a corpus: id, kind, media by modality, and metadata (label, language, voice …)."""

    item_id: str
    kind: str
    media: Mapping[str, Medium]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def kind_of(extensions: Mapping[str, Any] | set[str]) -> str:
    """The kind of a foreign item, from the extensions of its files alone.

    ``captioned_picture``, ``spoken_text`` or ``clip`` where words come with a picture, a sound or a video;
    else ``media`` (or ``text``), one target segment of its own.
    """
    modalities = {MEDIA_TYPES[name][0] for name in map(last_extension, extensions) if name in MEDIA_TYPES}
    words = any(TEXT_TYPES.get(last_extension(name)) == "text" for name in extensions)
    if words and "image" in modalities:
        return "captioned_picture"
    if words and "sound" in modalities:
        return "spoken_text"
    if modalities:
        return "media"
    return "text"


def last_extension(extension: str) -> str:
    """``"speech.ogg"`` to ``"ogg"``."""
    return extension.rpartition(".")[2]


def is_payload(extension: str) -> bool:
    """Whether a file of this extension is a medium of an item."""
    return last_extension(extension) in MEDIA_TYPES or last_extension(extension) in TEXT_TYPES


def item_from_files(item_id: str, files: Mapping[str, bytes], where: str) -> Item:
    """The item that a group of files describes.

    Payloads are handed on as they are; a damaged picture is the tokenizer's to refuse. Only what makes the
    item itself unreadable raises.

    Args:
        item_id: name shared by the files.
        files: bytes by extension; ``json`` is metadata (optional keys ``kind``, ``modality``).
        where: place named in errors.

    Raises:
        InvalidInputError: the metadata is no JSON object, or no file is a known medium.
    """
    metadata: dict[str, Any] = {}
    if "json" in files:
        try:
            metadata = json.loads(files["json"])
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{where}: metadata is not JSON ({error})") from None
        if not isinstance(metadata, dict):
            raise InvalidInputError(f"{where}: metadata is a {type(metadata).__name__}, not an object")
    kind = metadata.pop("kind", None) or kind_of(set(files))
    if not isinstance(kind, str) or not isinstance(metadata.get("names", {}), dict):
        raise InvalidInputError(f"{where}: 'kind' must be a string and 'names' an object")
    audio = metadata.pop("modality", None) or ("speech" if kind.startswith("spoken") else "sound")
    media: dict[str, Medium] = {}
    for extension, data in files.items():
        name = last_extension(extension)
        if name in MEDIA_TYPES:
            modality, content_type = MEDIA_TYPES[name]
            if modality == "sound":
                modality = audio
            elif modality == "image" and kind == "named_clip":  # WebP and GIF hold both
                modality = "video"
            media.setdefault(modality, Medium(modality, data=data, content_type=content_type))
        elif name in TEXT_TYPES:
            modality = TEXT_TYPES[name]
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                # The text tokenizer refuses it with a reason; a corpus only passes it on.
                media.setdefault(modality, Medium(modality, data=data, content_type="text/plain"))
                continue
            media.setdefault(modality, Medium(modality, text=text, content_type="text/plain"))
    if not media:
        raise InvalidInputError(
            f"{where}: no file of item {item_id!r} is a known medium ({', '.join(sorted(files))})"
        )
    return Item(item_id, kind, media, metadata)
