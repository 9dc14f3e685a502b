"""What `ernie-multi tokenizer data` does: built corpora become the files that the tokenizers' recipes read.

The tokenizers know nothing of corpora, so this is the bridge. The order of the items is that of the corpora,
so equal corpora give equal files, byte for byte, and an interrupted call leaves no file that is half written.
What is held out follows :mod:`ernie5.corpora.splits`: a picture by its concept, in every drawing style; a
clip by its voice, or by the concept that the corpus holds out; a handwritten digit by the corpus.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ernie5.corpora.builders import BUILDERS
from ernie5.corpora.builders.packages import require_tool, unpack
from ernie5.corpora.builders.progress import Report, progress_bars
from ernie5.corpora.corpus import SPLITS, corpus_names, data_home, open_corpus
from ernie5.corpora.digits import DIGIT_WORDS
from ernie5.corpora.splits import HELD_OUT_VOICES, is_held_out
from ernie5.corpora.tasks import QUESTIONS
from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.protocol.samples import Sample

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_CORPORA = {
    "vision": ("emoji", "stamps", "digits"),
    "video": ("motion",),
    "audio": ("digits", "speech", "stamps", "sounds"),
}
SPRITE_SIDE = 96
"""Pixels of a side of the pictures that the vision recipe draws from."""
PICTURE_SOURCES = {
    "noto": "emoji_noto",
    "twemoji": "emoji_twitter",
    "fluent": "emoji_fluent3d",
    "stamps": "stamps",
}
"""An item's ``source`` to the name, without ``.npz``, of the file that the vision recipe reads."""

# One task a kind of item, so that each item is read once.
_PICTURE_TASKS = ("emoji_draw", "draw", "digit_draw")
_CLIP_TASKS = ("speech_say", "sound_make")
_ANIMATION_TASKS = ("clip_draw",)
_TEXT_TASKS = ("text", "emoji_draw")
# What the shipped vocabulary saw of the package of poems, as prefixes of paths.
_SHIPPED_POEMS = ("dist/lunyu/", "dist/quantangshi/poet.tang.", "dist/shijing/", "dist/songci/")
_TEXT_FILES = {"en": "en.txt", "zh": "zh.txt", "zh-Hant": "zh.txt", "python": "code.txt"}


def write(name: str, out: Path, corpora: Sequence[str] | None = None) -> None:
    """Write what a tokenizer's recipe reads to ``out``, and print a summary.

    Args:
        name: the tokenizer: ``vision``, ``video``, ``vit`` (which reads what ``vision`` does), ``audio`` or
            ``text``.
        out: folder, made where it is missing; files of an earlier call are replaced.
        corpora: names of corpora or paths; default: :data:`DEFAULT_CORPORA`. Text without corpora is made of
            whole packages, as the shipped vocabulary was.

    Raises:
        InvalidInputError: a corpus isn't built (the message has the command), or the corpora lack what the
            recipe needs.
        UnavailableError: text without corpora: a package or program is missing.
    """
    with progress_bars() as progress:
        summary = _WRITERS[name](out, corpora, Report(progress, name))
    print(json.dumps(summary, indent=1, ensure_ascii=False))


def write_vision(out: Path, corpora: Sequence[str] | None, report: Report) -> dict[str, Any]:
    """``<source>.npz`` (``img`` uint8 ``[n, 96, 96, 4]`` RGBA, ``names``, ``test``) and ``mnist.npz`` (``x``
    uint8 ``[n, 28, 28]``, ``y``, ``test``).

    Each source has its file, without pictures where the corpora have none of it. Returns the number of items
    and of held-out ones by file.
    """
    from PIL.Image import open as open_picture

    sprites: dict[str, list[np.ndarray]] = {file: [] for file in PICTURE_SOURCES.values()}
    names: dict[str, list[str]] = {file: [] for file in sprites}
    digits: list[np.ndarray] = []
    labels: list[int] = []
    digit_test: list[bool] = []
    for sample in _samples(_chosen("vision", corpora), _PICTURE_TASKS, report):
        data = sample.segments[-1].data
        assert data is not None  # the tasks' last segment is the picture
        with open_picture(io.BytesIO(data)) as picture:
            if sample.metadata["task"] == "digit_draw":
                digits.append(np.asarray(picture.convert("L")))
                labels.append(int(sample.metadata["label"]))
                digit_test.append(sample.metadata["split"] == "test")
                continue
            source = sample.metadata.get("source")
            if source not in PICTURE_SOURCES:
                raise InvalidInputError(
                    f"item {sample.metadata['item']!r} has the source {source!r}; the recipe knows pictures "
                    f"of {', '.join(PICTURE_SOURCES)}",
                    param="corpora",
                )
            file = PICTURE_SOURCES[source]
            sprites[file].append(sprite_of(picture))
            names[file].append(str(sample.metadata["label"]))
    test = {file: [is_held_out(name) for name in names[file]] for file in sprites}
    _require("pictures", "emoji", [value for values in test.values() for value in values])
    _require("handwritten digits", "digits", digit_test)
    summary: dict[str, Any] = {}
    for file, pictures in sprites.items():
        empty = np.zeros((0, SPRITE_SIDE, SPRITE_SIDE, 4), np.uint8)
        images = np.stack(pictures) if pictures else empty
        _write_arrays(
            out / f"{file}.npz",
            img=images,
            names=np.array(names[file], dtype=str),
            test=np.array(test[file], dtype=bool),
        )
        summary[f"{file}.npz"] = {"items": len(images), "held out": sum(test[file])}
    _write_arrays(
        out / "mnist.npz",
        x=np.stack(digits),
        y=np.array(labels, np.int64),
        test=np.array(digit_test, dtype=bool),
    )
    summary["mnist.npz"] = {"items": len(digits), "held out": sum(digit_test)}
    return summary


def sprite_of(picture: Image) -> np.ndarray:
    """A square picture as RGBA, uint8 ``[96, 96, 4]``, that can be drawn on any background.

    The corpora store drawings on pure white. White that is connected with the edge becomes transparent; white
    inside the drawing stays. A picture that has transparency of its own keeps it.
    """
    from PIL.Image import Resampling, fromarray
    from scipy import ndimage

    rgba = np.array(picture.convert("RGBA"))
    if (rgba[..., 3] == 255).all():
        areas, _ = ndimage.label((rgba[..., :3] == 255).all(-1))
        edge = np.unique(np.concatenate([areas[0], areas[-1], areas[:, 0], areas[:, -1]]))
        rgba[np.isin(areas, edge[edge > 0]), 3] = 0
    sprite = fromarray(rgba)
    if sprite.size != (SPRITE_SIDE, SPRITE_SIDE):
        sprite = sprite.resize((SPRITE_SIDE, SPRITE_SIDE), Resampling.LANCZOS)
    return np.asarray(sprite)


def write_video(out: Path, corpora: Sequence[str] | None, report: Report) -> dict[str, Any]:
    """``motion.npz``: the frames of animations end to end (``frames`` uint8 ``[n, 64, 64, 3]``, ``offsets``,
    ``names``, ``test``), as the video tokenizer fits them.

    The recipe reads the pictures of :func:`write_vision` beside it. Returns the number of clips, of held-out
    ones and of frames.
    """
    from ernie5.tokenizers.vision.video.files import read_clip

    clips: list[np.ndarray] = []
    names: list[str] = []
    for sample in _samples(_chosen("video", corpora), _ANIMATION_TASKS, report):
        data = sample.segments[-1].data
        assert data is not None  # the task's last segment is the clip
        clips.append(read_clip(data).frames)
        names.append(str(sample.metadata["label"]))
    test = [is_held_out(name) for name in names]
    _require("animations", "motion", test)
    offsets = np.cumsum([0, *map(len, clips)], dtype=np.int64)
    _write_arrays(
        out / "motion.npz",
        frames=np.concatenate(clips),
        offsets=offsets,
        names=np.array(names, dtype=str),
        test=np.array(test, dtype=bool),
    )
    return {"motion.npz": {"items": len(clips), "held out": sum(test), "frames": int(offsets[-1])}}


def write_audio(out: Path, corpora: Sequence[str] | None, report: Report) -> dict[str, Any]:
    """``clips.npz``: 16 kHz clips end to end, with what :mod:`ernie5.tokenizers.audio.clips` asks of each.

    Returns the number of clips, of held-out ones and the minutes of sound.
    """
    from ernie5.tokenizers.audio.preprocessing import read_audio

    clips: list[np.ndarray] = []
    columns: dict[str, list[str]] = {name: [] for name in ("kind", "lang", "voice", "label", "split")}
    for sample in _samples(_chosen("audio", corpora), _CLIP_TASKS, report):
        segment = sample.segments[-1]
        assert segment.data is not None  # the tasks' last segment is the sound
        samples = read_audio(segment.data, segment.content_type).samples
        clips.append(np.rint(samples * 32767).astype(np.int16))
        about = sample.metadata
        source = str(about.get("source", "unknown"))
        if about["task"] == "sound_make":
            kind = "music" if source == "music" else "sound"
        else:
            kind = "human" if about.get("human") else source
        voice = str(about.get("voice", source))
        held_out = about["split"] == "test" or voice in HELD_OUT_VOICES
        row = (
            kind,
            about.get("language", ""),
            voice,
            about.get("label", ""),
            "test" if held_out else "train",
        )
        for values, value in zip(columns.values(), row):
            values.append(str(value))
    _require("clips", "digits", [split == "test" for split in columns["split"]])
    offsets = np.cumsum([0, *map(len, clips)], dtype=np.int64)
    text = {name: np.array(values, dtype=str) for name, values in columns.items()}
    _write_arrays(out / "clips.npz", a=np.concatenate(clips), off=offsets, **text)
    minutes = round(float(offsets[-1]) / 16_000 / 60, 1)
    return {
        "clips.npz": {"items": len(clips), "held out": columns["split"].count("test"), "minutes": minutes}
    }


def write_text(out: Path, corpora: Sequence[str] | None, report: Report) -> dict[str, Any]:
    """``en.txt``, ``zh.txt``, ``code.txt`` and ``names.txt``; returns their sizes in bytes.

    The recipe holds out blocks of lines itself, so both splits are written.
    """
    texts = _package_texts(report) if not corpora else _corpus_texts(_chosen("text", corpora), report)
    for name, text in texts.items():
        _replace(out / name, text.encode())
    return {name: {"bytes": len(text.encode())} for name, text in texts.items()}


def _package_texts(report: Report) -> dict[str, str]:
    """The files that the shipped vocabulary was made of; its card names their checksums."""
    from ernie5.tokenizers.text import sources

    require_tool("bible")
    home = data_home()
    fortunes = unpack("fortunes-zh", home)
    poems = unpack("poems", home, _SHIPPED_POEMS)

    def chinese() -> str:
        # The recipe reads all that is unpacked, and other builders may have unpacked more.
        with tempfile.TemporaryDirectory() as folder:
            for file in poems.rglob("*.json"):
                name = file.relative_to(poems).as_posix()
                if name.startswith(_SHIPPED_POEMS):
                    (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, Path(folder) / name)
            return sources.chinese(fortunes, Path(folder))

    makers: dict[str, Callable[[], str]] = {
        "en.txt": sources.english,
        "zh.txt": chinese,
        "code.txt": sources.code,
        "names.txt": sources.names,
    }
    try:
        return {name: make() for name, make in report.track(makers.items(), "reading packages", len(makers))}
    except ModuleNotFoundError as error:
        if error.name != "emoji":
            raise
        raise UnavailableError("emoji is not installed: pip install 'ernie-multi[corpora]'") from None


def _corpus_texts(corpora: Sequence[str], report: Report) -> dict[str, str]:
    parts: dict[str, list[str]] = {name: [] for name in sorted(set(_TEXT_FILES.values()))}
    english: set[str] = set()
    chinese: set[str] = set()
    for sample in _samples(corpora, _TEXT_TASKS, report):
        if sample.metadata["task"] == "emoji_draw":
            names = sample.metadata["names"]
            english.add(names["en"])
            chinese |= {names["zh"]} if names.get("zh") else set()
            continue
        language = sample.metadata.get("language")
        if language in _TEXT_FILES:
            parts[_TEXT_FILES[language]].append(sample.segments[-1].text or "")
    for name, found in parts.items():
        _require(f"texts for {name}", "text", [True] * len(found))
    spoken = [word for words in DIGIT_WORDS.values() for word in words]
    questions = [text for text in QUESTIONS.values() if "{" not in text]
    questions += [QUESTIONS["digit_draw"].format(label=digit) for digit in range(10)]
    says = [QUESTIONS["speech_say"].format(label=word) for word in spoken]
    draws = [QUESTIONS["emoji_draw"].format(name=name) for name in sorted(english)]
    short = [*sorted(english), *sorted(chinese), *draws, *dict.fromkeys(questions), *spoken, *says]
    return {name: "\n".join(found) + "\n" for name, found in parts.items()} | {
        "names.txt": "\n".join(short) + "\n"
    }


_WRITERS: dict[str, Callable[[Path, Sequence[str] | None, Report], dict[str, Any]]] = {
    "vision": write_vision,
    "video": write_video,
    "vit": write_vision,
    "audio": write_audio,
    "text": write_text,
}


def _chosen(name: str, corpora: Sequence[str] | None) -> Sequence[str]:
    """The corpora to read, all of them there."""
    corpora = corpora or DEFAULT_CORPORA[name]
    here = corpus_names()
    if missing := [corpus for corpus in corpora if corpus in BUILDERS and corpus not in here]:
        commands = " && ".join(f"ernie-multi corpus build {corpus}" for corpus in missing)
        raise InvalidInputError(
            f"not built yet: {', '.join(missing)}; run `{commands}`, or try `--corpora mini`, which ships",
            param="corpora",
        )
    return corpora


def _samples(corpora: Iterable[str], tasks: Collection[str], report: Report) -> Iterator[Sample]:
    """The samples of both splits of each corpus, under a bar each."""
    for name in corpora:
        for split in SPLITS:
            corpus = open_corpus(name, split, tasks=tasks)
            yield from report.track(corpus, f"{name}, {split}", len(corpus))


def _require(what: str, corpus: str, held_out: Sequence[bool]) -> None:
    if not any(held_out):
        raise InvalidInputError(
            f"the corpora hold {len(held_out)} {what}, none of them for testing; add the corpus {corpus!r}",
            param="corpora",
        )


def _write_arrays(path: Path, **arrays: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
    os.replace(part, path)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    os.replace(part, path)
