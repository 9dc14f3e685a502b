"""The corpus of sounds: recordings and pieces of music become items in the split of their voice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from ernie5.corpora.builders import sounds
from ernie5.corpora.builders.manifest import BuiltItem
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.corpus import open_corpus
from ernie5.corpora.splits import HELD_OUT_VOICES


def write_tone(path: Path, seconds: float, level: float = 0.5, rate: int = 8000) -> Path:
    time = np.arange(int(seconds * rate)) / rate
    tone = level * np.sin(2 * np.pi * 300 * time) * (0.5 + 0.5 * np.sin(2 * np.pi * 3 * time))
    soundfile.write(path, tone, rate)
    return path


def test_recordings_and_pieces_of_music_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word = write_tone(tmp_path / "word.wav", 0.8)
    silent = write_tone(tmp_path / "silent.wav", 0.8, level=0.0)
    track = write_tone(tmp_path / "track.wav", 20.0)
    recorded = [
        sounds._Recording("prompt/a/word", word, "spoken_word", "july-es", "word", "july-es", "es", "test"),
        sounds._Recording("prompt/a/none", silent, "spoken_word", "july-es", "none", "july-es", "es", "test"),
        *(
            sounds._Recording(
                f"music/track-{n}", track, "named_sound", "music", "music", "track", "", "train", start
            )
            for n, start in enumerate((0, 64_000))
        ),
    ]
    for name in ("_learners", "_symbols", "_music_and_signals"):
        monkeypatch.setattr(sounds, name, lambda home: iter(()))
    monkeypatch.setattr(sounds, "_prompts", lambda home: iter(recorded))
    monkeypatch.setattr(sounds, "utterances", lambda home: iter(()))
    manifest = sounds.build_sounds(tmp_path / "corpus", tmp_path, Report(None, "sounds"), workers=1)
    assert manifest["kinds"] == {"train": {"named_sound": 2}, "test": {"spoken_word": 1}}
    assert manifest["held_out"]["voices"] == ["july-es"]
    assert {licence["source"] for licence in manifest["licences"]} == {"july-es", "music"}
    sample = open_corpus(tmp_path / "corpus", "train", tasks={"sound_make"})[0]
    assert sample.metadata["source"] == "music"


def test_added_voices_are_neither_held_out_nor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {f"espeak-{timbre}" for timbre in sounds.MORE_TIMBRES}
    assert len(more) == len(sounds.MORE_TIMBRES)
    assert not more & HELD_OUT_VOICES
    assert not set(sounds.MORE_TIMBRES) & set(sounds.TIMBRES)
    assert not set(sounds.MORE_ACCENTS) & set(sounds.ACCENTS)
    monkeypatch.setattr(sounds, "emoji_names", lambda home, languages: ())
    spoken = [utterance for _, utterance in sounds.utterances(Path())]
    assert len(spoken) == 60 * sounds.DIGIT_CLIPS
    assert not any(utterance.held_out for utterance in spoken)


def test_a_file_name_with_a_dot_gives_an_item_id_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``train_valley.theme.ogg`` of ktuberling, which ended a whole build at its last step."""
    for source, inner in (("klettres", "klettres"), ("ktuberling", "ktuberling/sounds")):
        folder = tmp_path / source / "usr" / "share" / inner / "en"
        folder.mkdir(parents=True)
        write_tone(folder / "valley.theme.ogg", 0.8)
    monkeypatch.setattr(sounds, "unpack", lambda name, home: home / name)
    recorded = list(sounds._learners(tmp_path))
    assert [recording.item_id for recording in recorded] == [
        "klettres/en/valley-theme",
        "ktuberling/en/valley-theme",
    ]
    assert all(sounds._take(recording) for recording in recorded)
    with pytest.raises(ValueError, match="holds a dot"):
        BuiltItem("a/b.theme", "spoken_word", {"ogg": b""}, {})
