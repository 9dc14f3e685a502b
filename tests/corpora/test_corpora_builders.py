"""Builders: packages are checked, tools named where missing, clips cut and encoded to the same bytes."""

import hashlib
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ernie5.corpora.builders import BUILDERS, build, is_complete, packages
from ernie5.corpora.builders.licences import LICENCES
from ernie5.corpora.builders.manifest import BuiltItem, write_corpus
from ernie5.corpora.builders.packages import PACKAGES, Package, fetch, require_tool
from ernie5.corpora.builders.progress import Report
from ernie5.corpora.builders.voices import (
    PEAK,
    SAMPLE_RATE,
    TEST_TIMBRES,
    TIMBRES,
    Utterance,
    cut_to_speech,
    fix_serial,
    opus,
    random_utterance,
    resample,
    speak,
)
from ernie5.corpora.corpus import open_corpus
from ernie5.protocol.errors import InvalidInputError, UnavailableError


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH of our own: call with a name and the lines of a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return add


@pytest.fixture
def package(monkeypatch):
    """A package whose file holds ``hello``."""
    wanted = Package("apt", "hello", "1", "hello_1_all.deb", hashlib.sha256(b"hello").hexdigest())
    monkeypatch.setitem(PACKAGES, "hello", wanted)
    return wanted


def test_a_package_is_fetched_once_and_again_when_damaged(tmp_path, tools, package):
    tools("apt-get", f'echo "$@" >> {tmp_path}/calls; printf hello > {package.file}')
    path = fetch("hello", tmp_path)
    assert fetch("hello", tmp_path) == path
    assert (tmp_path / "calls").read_text() == "download -q hello=1\n"
    path.write_bytes(b"hellp")
    assert fetch("hello", tmp_path).read_bytes() == b"hello"


def test_a_wrong_file_is_removed_and_told(tmp_path, tools, package):
    tools("apt-get", f"printf other > {package.file}")
    with pytest.raises(UnavailableError, match=r"hello_1_all\.deb has SHA-256 .* expected"):
        fetch("hello", tmp_path)
    assert list((tmp_path / "packages").iterdir()) == []


def test_a_failing_client_is_quoted(tmp_path, tools, package):
    tools("apt-get", "echo no such package >&2; exit 100")
    with pytest.raises(UnavailableError, match=r"exit 100.*no such package"):
        fetch("hello", tmp_path)


@pytest.mark.parametrize(
    ("tool", "hint"), [("espeak-ng", "espeak-ng"), ("rsvg-convert", "librsvg2-bin"), ("npm", "npm")]
)
def test_a_missing_tool_names_what_to_install(tools, tool, hint):
    with pytest.raises(UnavailableError, match=f"{tool}.*install.*{hint}"):
        require_tool(tool)


def test_pins_are_whole():
    for name, package in PACKAGES.items():
        assert len(package.sha256) == 64, name
        assert package.version in package.file.replace("%3a", ":"), name


def test_unknown_corpora_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=f"there are {', '.join(BUILDERS)}"):
        build("everything", tmp_path)


def small_corpus(folder):
    items = [BuiltItem("a", "text", {"txt": b"hello"}, {"label": "a", "language": "en", "source": "bible"})]
    return write_corpus(folder, "text", {"text-train.tar.zst": ("train", items)}, LICENCES, {})


def test_a_complete_corpus_is_kept(tmp_path, monkeypatch):
    folder = tmp_path / "corpora" / "text"
    small_corpus(folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setenv("PATH", "")  # a build could fetch nothing
    assert build("text", tmp_path) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    monkeypatch.setenv("ERNIE_MULTI_DATA", str(tmp_path))
    assert open_corpus("text")[0].segments[0].text == "hello"


@pytest.mark.parametrize("harm", ["missing", "changed", "manifest"])
def test_an_incomplete_corpus_is_noticed(tmp_path, harm):
    small_corpus(tmp_path)
    assert is_complete(tmp_path)
    if harm == "missing":
        (tmp_path / "text-train.tar.zst").unlink()
    elif harm == "changed":
        with (tmp_path / "text-train.tar.zst").open("r+b") as file:
            file.write(b"x")
    else:
        (tmp_path / "manifest.json").write_text("{")
    assert not is_complete(tmp_path)


def test_items_without_licence_are_not_written(tmp_path):
    items = [BuiltItem("a", "text", {"txt": b"x"}, {"source": "somewhere"})]
    with pytest.raises(ValueError, match="without licence entry: somewhere"):
        write_corpus(tmp_path, "x", {"x.tar": ("train", items)}, LICENCES, {})
    assert not (tmp_path / "manifest.json").exists()


def tone(seconds, level=1.0, hertz=220):
    times = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (level * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def silence(seconds):
    return np.zeros(round(seconds * SAMPLE_RATE), np.float32)


def test_silence_and_clicks_are_cut():
    click = np.full(160, 0.9, np.float32)
    clip = np.concatenate([click, silence(0.5), tone(0.4, 0.3), silence(0.7)])
    cut = cut_to_speech(clip)
    assert 0.4 <= len(cut) / SAMPLE_RATE <= 0.5
    assert np.abs(cut).max() == pytest.approx(PEAK, abs=0.01)
    assert cut[0] == cut[-1] == 0


@pytest.mark.parametrize("clip", [np.zeros(0, np.float32), silence(1.0), tone(0.01)])
def test_clips_without_speech_are_refused(clip):
    with pytest.raises(ValueError, match=r"silent|too few"):
        cut_to_speech(clip)


def test_opus_files_are_equal_and_decode():
    clip = tone(0.5, 0.5)
    first = opus(clip)
    assert opus(clip) == first
    assert opus(tone(0.5, 0.4)) != first
    back, rate = soundfile.read(io.BytesIO(first))
    assert (rate, len(back)) == (SAMPLE_RATE, len(clip))
    error = np.mean((back - clip) ** 2) / np.mean(clip**2)
    assert error < 0.01


def test_the_serial_number_changes_nothing_else():
    clip = opus(tone(0.3))
    other = fix_serial(clip, 1234)
    assert other != clip
    assert fix_serial(other, int.from_bytes(clip[14:18], "little")) == clip
    np.testing.assert_array_equal(soundfile.read(io.BytesIO(other))[0], soundfile.read(io.BytesIO(clip))[0])
    with pytest.raises(ValueError, match="no Ogg page"):
        fix_serial(clip + b"rest", 1)


def test_resampling_keeps_the_pitch():
    clip = resample(tone(1.0, hertz=1000), SAMPLE_RATE, 8000)
    assert len(clip) == 8000
    assert np.abs(np.fft.rfft(clip)).argmax() == 1000


def test_draws_of_voices_are_fixed_and_never_held_out():
    assert random_utterance("seven", "en", "k") == random_utterance("seven", "en", "k")
    made = {random_utterance("seven", "en", f"k{number}") for number in range(200)}
    assert len(made) > 190
    assert not any(utterance.held_out for utterance in made)
    assert random_utterance("seven", "en", "k", TEST_TIMBRES).held_out
    assert not set(TIMBRES) & set(TEST_TIMBRES)


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
@pytest.mark.parametrize(("text", "language"), [("seven", "en"), ("七", "zh"), ("семь", "ru")])
def test_the_synthesiser_speaks(text, language):
    clip = speak(random_utterance(text, language, "test", TIMBRES[:4]))
    assert 0.15 < len(clip) / SAMPLE_RATE < 1.3
    assert np.abs(clip).max() == pytest.approx(PEAK, abs=0.01)


def test_a_recording_played_faster_is_shorter(tmp_path):
    path = tmp_path / "digit.wav"
    soundfile.write(
        path, resample(np.concatenate([silence(0.3), tone(0.5), silence(0.3)]), SAMPLE_RATE, 8000), 8000
    )
    plain, fast = (speak(Utterance("x", "en", "asterisk-en", rate=rate, file=path)) for rate in (1.0, 1.12))
    assert len(fast) < 0.95 * len(plain)


def test_a_silent_report_passes_things_on():
    assert list(Report(None, "x").track(iter("abc"), "step")) == ["a", "b", "c"]


def test_builders_write_no_host_names():
    # Packages come through their clients, whose settings alone say where from.
    folder = Path(packages.__file__).parent
    sources = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "licences.py")
    assert "apt-get" in sources
    assert "http" not in sources


def animation_package(home, monkeypatch):
    """A package of three files: an animation, the same with another code form, and a still picture."""
    from PIL import Image

    assets = home / "assets"
    assets.mkdir()
    frames = [Image.new("RGBA", (64, 64), (40 * index, 0, 0, 255 * (index > 0))) for index in range(5)]
    frames[0].save(assets / "1f600.webp", save_all=True, append_images=frames[1:], duration=42, lossless=True)
    frames[0].save(assets / "1f601.webp")
    frames[0].save(assets / "ffff.webp", save_all=True, append_images=frames[1:], duration=42, lossless=True)
    from ernie5.corpora.builders import motion
    from ernie5.corpora.builders.pictures import Emoji

    names = (Emoji("\U0001f600", {"en": "grinning face", "zh": "嘿嘿"}), Emoji("\U0001f601", {"en": "b"}))
    monkeypatch.setattr(motion, "unpack", lambda *arguments: home)
    monkeypatch.setattr(motion, "emoji_names", lambda home: names)
    return motion


def test_animations_become_captioned_clips(tmp_path, monkeypatch):
    from PIL import Image

    motion = animation_package(tmp_path, monkeypatch)
    assert [code for code, _ in motion.animations(tmp_path)] == ["1f600"]
    manifest = motion.build_motion(tmp_path / "corpus", tmp_path, Report(None, "motion"))
    assert {licence["source"] for licence in manifest["licences"]} == {"motion", "names"}
    ((split, kinds),) = manifest["kinds"].items()
    assert kinds == {"named_clip": 1}
    corpus = open_corpus(tmp_path / "corpus", split)
    assert list(corpus.tasks) == ["clip_name_en", "clip_name_zh", "clip_draw"]
    sample = corpus[2]
    assert [segment.modality for segment in sample.segments] == ["text", "video"]
    assert sample.segments[0].text == "Animate: grinning face"
    with Image.open(io.BytesIO(sample.segments[1].data)) as clip:
        assert (clip.n_frames, clip.size) == (3, (96, 96))  # every second frame
        clip.seek(0)
        assert clip.convert("RGB").getpixel((5, 5)) == (255, 255, 255)  # over white
        assert clip.info["duration"] == 84
