"""Writes the four text files that the shipped tokenizer was trained on.

``python -m ernie5.tokenizers.text.sources OUT --fortunes DIR --poems DIR`` needs the ``bible`` command
(Debian's ``bible-kjv``), the unpacked packages ``fortunes-zh`` (Debian) and ``chinese-poetry`` (npm) and the
Python package ``emoji``; it reads the running Python's standard library (shipped model: 3.11). Then
``python -m ernie5.tokenizers.text.train OUT/en.txt OUT/zh.txt OUT/code.txt --names OUT/names.txt`` gives
the model; its card names the checksums of the files.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

CHINESE_CHARACTERS = 6_000_000
CODE_CHARACTERS = 5_000_000

_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_LEFT_OUT = ("site-packages", "/test", "idlelib", "lib2to3/tests", "encodings")
_NUMBERS = (
    "zero one two three four five six seven eight nine ten",
    "cero uno dos tres cuatro cinco seis siete ocho nueve diez",
    "zéro un deux trois quatre cinq six sept huit neuf dix",
    "zero uno due tre quattro cinque sei sette otto nove dieci",
    "ноль один два три четыре пять шесть семь восемь девять десять",
    "null eins zwei drei vier fünf sechs sieben acht neun zehn",
    "zero um dois três quatro cinco seis sete oito nove dez",
    "零 一 二 三 四 五 六 七 八 九 十",
)


def emoji_names(language: str) -> list[str]:
    """Names of all fully qualified emoji, sorted, without repetitions."""
    import emoji  # needed by this recipe only

    emoji.config.load_language(language)
    known = (
        entry for entry in emoji.EMOJI_DATA.values() if entry["status"] == emoji.STATUS["fully_qualified"]
    )
    return sorted({entry[language].strip(":").replace("_", " ") for entry in known if language in entry})


def english() -> str:
    """The King James Version, a verse a line, then the English names of emoji."""
    command = ["bible", "-f", "Gen1:1-Rev22:21"]
    verses = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    lines = [line.partition(" ")[2] for line in verses.splitlines() if " " in line]
    return "\n".join([*lines, *emoji_names("en")]) + "\n"


def chinese(fortunes: Path, poems: Path) -> str:
    """Sayings and poems, simplified and traditional, then the Chinese names of emoji."""
    folder = fortunes / "usr" / "share" / "games" / "fortunes"
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.suffix not in (".dat", ".u8") and not file.is_symlink()
    ]
    sayings = [
        _COLOUR.sub("", file.read_text(encoding="utf-8", errors="ignore")).replace("\n%\n", "\n")
        for file in files
    ]
    text = "\n".join(sayings) + "\n" + "\n".join(_verses(poems))
    return text[:CHINESE_CHARACTERS] + "\n" + "\n".join(emoji_names("zh")) + "\n"


def _verses(poems: Path) -> Iterator[str]:
    for file in sorted((poems / "dist").rglob("*.json"), key=str):
        content = json.loads(file.read_text(encoding="utf-8"))
        for poem in content if isinstance(content, list) else []:
            lines = poem.get("paragraphs") or poem.get("content")
            if isinstance(lines, list) and lines:
                yield "\n".join(lines)


def code() -> str:
    """Modules of the standard library, the top ones first."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: list[str] = []
    size = 0
    for file in chain(sorted(root.glob("*.py")), sorted(root.glob("*/*.py"))):
        if any(part in str(file) for part in _LEFT_OUT):
            continue
        sources.append(file.read_text(encoding="utf-8", errors="ignore"))
        size += len(sources[-1])
        if size > CODE_CHARACTERS:
            break
    return "\n".join(sources)


def names() -> str:
    """Short texts, one a line: emoji without their skin tones, the tasks' phrases, spoken numbers."""
    toneless = [name for name in emoji_names("en") if "skin tone" not in name]
    chinese_names = [name for name in emoji_names("zh") if "肤色" not in name]
    numbers = [word for words in _NUMBERS for word in words.split()]
    tasks = ["Which digit is this?", "Transcribe.", "What is this?", "这是什么？"]
    tasks += [f"Draw the digit {digit}." for digit in range(10)]
    says, draws = [f"Say: {word}" for word in numbers], [f"Draw: {name}" for name in toneless]
    return "\n".join([*toneless, *chinese_names, *draws, *tasks, *numbers, *says]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write en.txt, zh.txt, code.txt and names.txt.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--fortunes", type=Path, required=True, help="unpacked Debian package fortunes-zh")
    parser.add_argument("--poems", type=Path, required=True, help="unpacked npm package chinese-poetry")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    texts = {
        "en.txt": english(),
        "zh.txt": chinese(arguments.fortunes, arguments.poems),
        "code.txt": code(),
        "names.txt": names(),
    }
    for name, text in texts.items():
        (arguments.out / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
