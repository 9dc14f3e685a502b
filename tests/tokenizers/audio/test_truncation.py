"""Sounds that were cut off are refused by name; whole ones, also those from a pipe or with tags, are not."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest

from ernie5.protocol.errors import InvalidMediaError
from ernie5.tokenizers.audio.preprocessing import read_audio
from ernie5.tokenizers.audio.truncation import refuse_truncated
from tests.tokenizers.audio.clips import encoded, voice_like

RATE = 48_000
SNDFILE = ("WAV", "RF64", "W64", "AIFF", "AU", "CAF", "NIST", "VOC", "OGG", "MP3")
# Container, codec and the name that the refusal gives.
FFMPEG = {
    "webm": ("libopus", "Matroska or WebM"),
    "matroska": ("aac", "Matroska or WebM"),
    "adts": ("aac", "ADTS"),
    "w64": ("pcm_s16le", "W64"),
    "au": ("pcm_s16be", "AU"),
    "voc": ("pcm_s16le", "VOC"),
    "caf": ("pcm_s16be", "CAF"),
    "mp3": ("libmp3lame", "MP3"),
}


class Pipe(io.BytesIO):
    """A file that can't go back to fill in sizes."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: int) -> int:
        raise io.UnsupportedOperation("a pipe")


def written(container: str, codec: str, file: io.BytesIO | None = None, **options: str) -> bytes:
    file = io.BytesIO() if file is None else file
    with av.open(file, "w", format=container, options=options) as output:
        output.metadata["title"] = "a voice"
        stream = output.add_stream(codec, rate=RATE, layout="mono")
        samples = voice_like(2.0, RATE)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        resampler = av.AudioResampler(stream.format, "mono", RATE, frame_size=stream.frame_size or 1024)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


def whole_files() -> dict[str, tuple[bytes, str]]:
    voice = voice_like(2.0, RATE)
    files = {f"ffmpeg-{key}": (written(key, codec), name) for key, (codec, name) in FFMPEG.items()}
    for name in SNDFILE:
        for channels in (1, 2):
            data = encoded(np.stack([voice] * channels, axis=1), RATE, name)
            files[f"{name}-{channels}"] = data, name.replace("OGG", "Ogg")
    return files


FILES = whole_files()


@pytest.mark.parametrize("key", FILES)
def test_whole_files_are_read(key: str) -> None:
    assert read_audio(FILES[key][0]).seconds == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("share", [0.99, 0.9, 0.5, 0.1])
@pytest.mark.parametrize("key", FILES)
def test_cut_files_are_refused_by_name(key: str, share: float) -> None:
    data, name = FILES[key]
    with pytest.raises(InvalidMediaError, match=f"the {name} file is truncated: "):
        read_audio(data[: int(len(data) * share)])


@pytest.mark.parametrize("key", FILES)
def test_what_follows_the_sound_does_no_harm(key: str) -> None:
    data, _ = FILES[key]
    for tail in (b"TAG" + bytes(125), bytes(5)):
        refuse_truncated(data + tail)


@pytest.mark.parametrize(
    ("container", "codec"),
    [("au", "pcm_s16be"), ("webm", "libopus"), ("matroska", "aac"), ("adts", "aac"), ("mp3", "libmp3lame")],
)
def test_files_written_to_a_pipe_are_read(container: str, codec: str) -> None:
    data = written(container, codec, Pipe())
    assert read_audio(data).seconds == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(("container", "codec"), [("w64", "pcm_s16le"), ("caf", "pcm_s16be")])
def test_sizes_left_open_are_no_cut(container: str, codec: str) -> None:
    # libsndfile can't read these, but they are not refused as cut.
    refuse_truncated(written(container, codec, Pipe()))


@pytest.mark.parametrize("size", [0, 0xFFFF_FFFF_FFFF_FFFF])
def test_an_open_size_in_rf64_is_no_cut(size: int) -> None:
    data = bytearray(FILES["RF64-1"][0])
    struct.pack_into("<Q", data, 28, size)
    refuse_truncated(bytes(data))


def test_ogg_cut_in_the_name_of_a_page_is_refused() -> None:
    data, _ = FILES["OGG-1"]
    with pytest.raises(InvalidMediaError, match="the Ogg file is truncated"):
        refuse_truncated(data[: data.rfind(b"OggS") + 2])


def test_an_mp3_cut_within_its_last_tag_is_whole() -> None:
    data = written("mp3", "libmp3lame", write_id3v1="1")
    assert data[-128:-125] == b"TAG"
    assert read_audio(data[:-100]).seconds == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("more", ["bytes", "frames"])
def test_one_wrong_count_in_an_mp3_is_no_cut(more: str) -> None:
    data = bytearray(FILES["MP3-1"][0])
    at = max(data.find(b"Xing"), data.find(b"Info")) + (8 if more == "frames" else 12)
    struct.pack_into(">I", data, at, struct.unpack_from(">I", data, at)[0] + 2000)
    refuse_truncated(bytes(data))


def test_a_compressed_sphere_file_is_not_measured_by_its_samples() -> None:
    data = FILES["NIST-1"][0]
    compressed = data.replace(b"sample_coding -s3 pcm", b"sample_coding -s26 pcm,embedded-shorten-v2.00", 1)
    assert compressed != data
    refuse_truncated(compressed[: len(data) // 2])
