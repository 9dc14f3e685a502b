"""Sound for the audio tokenizer: people of many languages, more synthetic voices, music, interface sounds.

Whole voices are held out, not single recordings: those of :data:`~ernie5.corpora.splits.HELD_OUT_VOICES`,
one in eight languages of the letters and nouns, one of the pieces of music, and one in ten interface sounds.
Spoken digits of many languages' stamp recordings are for measuring only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ernie5.corpora.builders.items import spoken_items
from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import BuiltItem, by_split, write_corpus
from ernie5.corpora.builders.packages import unpack
from ernie5.corpora.builders.pictures import emoji_names
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.builders.voices import (
    ACCENTS,
    FLITE_VOICES,
    MORE_ACCENTS,
    MORE_TIMBRES,
    PEAK,
    RECORDED,
    SAMPLE_RATE,
    TEST_TIMBRES,
    TIMBRES,
    Utterance,
    cut_to_speech,
    opus,
    read_recording,
    recordings,
)
from ernie5.corpora.digits import DIGIT_WORDS
from ernie5.corpora.splits import HELD_OUT_VOICES, draw, is_held_out

LONGEST_SPEECH, LONGEST_SOUND, PIECE = 8.0, 8.0, 8.0
"""Seconds; music is cut into pieces."""
NAMES_A_LANGUAGE = 300
DIGIT_CLIPS = 16
"""Synthetic clips of each digit word in voices that the corpus of digits lacks."""
TEST_MUSIC = "reno_project-system"
_SYMBOL_LANGUAGES = {"en_GB": "en", "es": "es", "fr": "fr", "it": "it", "ru": "ru", "zh_tw": "zh"}


@dataclass(frozen=True, slots=True)
class _Recording:
    """A file to take in: what it is, and from which sample on, where it is a piece of a longer one."""

    item_id: str
    path: Path
    kind: str
    source: str
    label: str
    voice: str
    language: str
    split: str
    start: int | None = None


def _words(name: str) -> str:
    return " ".join(re.split(r"[-_ ]+", name)).strip()


def _prompts(home: Path) -> Iterator[_Recording]:
    """Everything but digits that the eight people of the telephone prompts say."""
    for package, (language, _) in RECORDED.items():
        split = "test" if package in HELD_OUT_VOICES else "train"
        for name, path in recordings(package, home).items():
            if not re.fullmatch(r"digits/\d", name):
                yield _Recording(
                    f"prompt/{package}/{name}",
                    path,
                    "spoken_word",
                    package,
                    _words(path.stem),
                    package,
                    language,
                    split,
                )


def _learners(home: Path) -> Iterator[_Recording]:
    """Letters, syllables and nouns from two programs for children, each language by its own speakers."""
    for source, inner in (("klettres", "klettres"), ("ktuberling", "ktuberling/sounds")):
        root = unpack(source, home) / "usr" / "share" / inner
        for path in sorted(root.rglob("*.ogg")):
            language = path.relative_to(root).parts[0].replace("@", "-")
            split = "test" if draw(f"speakers {language}", 8) == 0 else "train"
            name = path.relative_to(root).with_suffix("").as_posix().replace("@", "-")
            yield _Recording(
                f"{source}/{name.replace('.', '-')}",
                path,
                "spoken_word",
                source,
                _words(path.stem),
                f"{source}-{language}",
                language,
                split,
            )


def _symbols(home: Path) -> Iterator[_Recording]:
    """Digits said by the people of the stamps; other recordings of theirs are in the training split."""
    root = unpack("stamps", home) / "usr" / "share" / "tuxpaint" / "stamps"
    for path in sorted(root.rglob("*.ogg")):
        match = re.fullmatch(r"(\d)_(\w+?)", path.stem)
        if match and match[2] in _SYMBOL_LANGUAGES:
            language = _SYMBOL_LANGUAGES[match[2]]
            yield _Recording(
                f"digit/{path.stem}",
                path,
                "spoken_word",
                "stamps",
                DIGIT_WORDS[language][int(match[1])],
                f"stamps-digits-{language}",
                language,
                "test",
            )


def _music_and_signals(home: Path) -> Iterator[_Recording]:
    import soundfile

    for path in sorted((unpack("music", home) / "usr" / "share" / "asterisk" / "moh").glob("*.wav")):
        info = soundfile.info(path)
        split = "test" if path.stem == TEST_MUSIC else "train"
        step = round(PIECE * info.samplerate)
        for number, start in enumerate(range(0, info.frames - step // 2, step)):
            yield _Recording(
                f"music/{path.stem}-{number:03d}",
                path,
                "named_sound",
                "music",
                "music",
                path.stem,
                "",
                split,
                start,
            )
    for path in sorted((unpack("signals", home) / "usr" / "share" / "sounds").rglob("*.oga")):
        label = _words(path.stem)
        split = "test" if is_held_out(label) else "train"
        yield _Recording(f"signal/{path.stem}", path, "named_sound", "signals", label, "signals", "", split)


def _piece(path: Path, start: int) -> np.ndarray:
    """A piece of a long recording, float32 [n] at 16 kHz, as loud as the recording has it."""
    import soundfile

    from ernie5.corpora.builders.voices import resample

    rate = soundfile.info(path).samplerate
    clip, _ = soundfile.read(path, round(PIECE * rate), start=start, dtype="float32", always_2d=True)
    clip = resample(clip.mean(axis=1), rate)
    peak = float(np.abs(clip).max())
    if peak < 0.02:
        raise ValueError("the piece is silent")
    return clip * min(1.0, PEAK / peak)


def _take(recording: _Recording) -> tuple[str, BuiltItem] | None:
    try:
        if recording.start is not None:
            clip = _piece(recording.path, recording.start)
        else:
            clip = cut_to_speech(read_recording(recording.path))
    except (ValueError, RuntimeError):  # silent, too short to filter, or not decodable
        return None
    seconds = len(clip) / SAMPLE_RATE
    longest = LONGEST_SPEECH if recording.kind == "spoken_word" else LONGEST_SOUND + 0.1
    if not 0.1 <= seconds <= longest:
        return None
    metadata = {
        "label": recording.label,
        "voice": recording.voice,
        "seconds": round(seconds, 3),
        "source": recording.source,
    }
    if recording.kind == "spoken_word":
        metadata |= {"language": recording.language, "human": True}
    return recording.split, BuiltItem(recording.item_id, recording.kind, {"ogg": opus(clip)}, metadata)


def utterances(home: Path) -> Iterator[tuple[str, Utterance]]:
    """Emoji names in fourteen languages and digits in six, by timbres the other corpora lack too."""
    accents = ACCENTS | MORE_ACCENTS
    train = TIMBRES + MORE_TIMBRES
    names = emoji_names(home, tuple(accents))
    for language, voices in accents.items():
        named = [emoji for emoji in names if language in emoji.names and len(emoji.names[language]) <= 60]
        named.sort(key=lambda emoji: draw(f"sounds {language} {emoji.code}", 1 << 30))
        for emoji in named[:NAMES_A_LANGUAGE]:
            key = f"name-{language}-{emoji.code}"
            timbres = TEST_TIMBRES if draw(f"held out sounds {key}", 12) == 0 else train
            yield key, _drawn(emoji.names[language], language, f"sounds {key}", timbres, voices)
    for language, words in DIGIT_WORDS.items():
        for digit, word in enumerate(words):
            for number in range(DIGIT_CLIPS):
                key = f"digit-{language}-{digit}-{number:02d}"
                yield key, _drawn(word, language, f"sounds {key}", MORE_TIMBRES, accents[language])
    english = [emoji.names["en"] for emoji in names if len(emoji.names["en"]) <= 60]
    english.sort(key=lambda name: draw(f"sounds flite {name}", 1 << 30))
    for number, name in enumerate(english[:400]):
        voice = FLITE_VOICES[number % len(FLITE_VOICES)]
        rate = 0.8 + draw(f"flite rate {name}", 45) / 100
        yield f"flite-{number:03d}", Utterance(name, "en", f"flite-{voice}", rate=rate)


def _drawn(
    text: str, language: str, key: str, timbres: tuple[str, ...], accents: tuple[str, ...]
) -> Utterance:
    """``text`` in a timbre, accent, rate and pitch that ``key`` chooses, from a wider range than usual."""
    return Utterance(
        text,
        language,
        f"espeak-{timbres[draw(f'timbre {key}', len(timbres))]}",
        accent=accents[draw(f"accent {key}", len(accents))],
        rate=0.7 + draw(f"rate {key}", 75) / 100,
        pitch=5 + draw(f"pitch {key}", 91),
    )


def build_sounds(folder: Path, home: Path, report: Report, workers: int = 2) -> dict[str, Any]:
    """Write the corpus to ``folder``; returns its manifest."""
    recorded = [*_prompts(home), *_learners(home), *_symbols(home), *_music_and_signals(home)]
    with ProcessPoolExecutor(workers) as pool:
        found = list(report.track(pool.map(_take, recorded, chunksize=32), "recordings", len(recorded)))
    taken = [item for item in found if item is not None]
    spoken = spoken_items(utterances(home), LONGEST_SPEECH, report, workers)
    held_out = {
        "voices": sorted({item.metadata["voice"] for split, item in taken + spoken if split == "test"}),
        "signals": "one in ten, by the MD5 of the name (ernie5.corpora.splits)",
    }
    shards = by_split("recorded", taken) | by_split("spoken", spoken)
    return write_corpus(folder, "sounds", shards, LICENCES, held_out)
