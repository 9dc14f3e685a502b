"""What comes from outside: every file gives a waveform or an error that names its fault."""

from __future__ import annotations

import contextlib
import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import scipy.io
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from ernie5.protocol.errors import (
    ErnieMultiError,
    InvalidMediaError,
    MediaTooLargeError,
    UnsupportedMediaError,
)
from ernie5.tokenizers.audio.preprocessing import Limits, Waveform, read_audio, to_codec_rate, write_audio
from tests.tokenizers.audio.clips import encoded, voice_like

ODD_FILES = sorted((Path(scipy.io.__file__).parent / "tests" / "data").glob("*.wav"))


def in_container(samples: np.ndarray, rate: int, container: str, codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="fltp", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(stream.format, "mono", rate, frame_size=stream.frame_size or 1024)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


def spectral_distance(left: np.ndarray, right: np.ndarray) -> float:
    count = min(len(left), len(right))
    one, two = (np.abs(np.fft.rfft(x[:count])) for x in (left, right))
    return float(np.abs(one - two).sum() / two.sum())


@pytest.mark.parametrize("rate", [1_000, 8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 384_000])
def test_any_rate_becomes_16_khz_of_the_same_duration_and_pitch(rate: int) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 200 * np.arange(rate) / rate).astype(np.float32)
    waveform = read_audio(encoded(tone, rate))
    assert waveform.sample_rate == 16_000
    assert waveform.samples.dtype == np.float32
    assert abs(len(waveform.samples) - 16_000) <= 1
    assert int(np.abs(np.fft.rfft(waveform.samples)).argmax()) == 200


def test_a_rate_without_a_small_ratio_is_resampled_too() -> None:
    waveform = read_audio(encoded(voice_like(0.5, 47_951), 47_951))
    assert abs(waveform.seconds - 0.5) < 0.001


@pytest.mark.parametrize(
    ("container", "subtype"),
    [
        ("WAV", "PCM_24"),
        ("WAV", "FLOAT"),
        ("WAV", "ULAW"),
        ("FLAC", None),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", None),
        ("AIFF", None),
        ("W64", None),
        ("RF64", None),
    ],
)
def test_sndfile_formats(container: str, subtype: str | None) -> None:
    samples = voice_like(1.0)
    waveform = read_audio(encoded(samples, 16_000, container, subtype))
    assert abs(waveform.seconds - 1.0) < 0.15
    if container != "MP3":  # which starts with the encoder's delay
        assert spectral_distance(waveform.samples, samples) < 0.5


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("adts", "aac"), ("matroska", "aac")]
)
def test_ffmpeg_containers(container: str, codec: str) -> None:
    samples = voice_like(1.0, 48_000)
    waveform = read_audio(in_container(samples, 48_000, container, codec), "video/mp4")
    assert abs(waveform.seconds - 1.0) < 0.1
    assert 0.5 < np.std(waveform.samples) / np.std(samples) < 2


def test_channels_are_mixed_and_counted() -> None:
    samples = voice_like(0.5)
    stereo = read_audio(encoded(np.stack([samples, 0.5 * samples], axis=1), subtype="FLOAT"))
    assert stereo.channels == 2
    np.testing.assert_allclose(stereo.samples, 0.75 * samples, atol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 8, 44, 64, "half", "all but one"])
def test_truncated_wav_is_refused(size: int | str) -> None:
    data = encoded(voice_like(0.5))
    cut = {"half": len(data) // 2, "all but one": len(data) - 1}.get(size, size)
    with pytest.raises(InvalidMediaError):
        read_audio(data[:cut], "audio/wav")


@pytest.mark.parametrize("container", ["FLAC", "OGG", "AIFF"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9])
def test_other_truncated_files_are_refused(container: str, share: float) -> None:
    data = encoded(voice_like(3.0), container=container)
    with pytest.raises(InvalidMediaError):
        read_audio(data[: int(len(data) * share)])


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("webm", "libopus")])
def test_ffmpeg_containers_cut_short_give_less_or_an_error(container: str, codec: str) -> None:
    data = in_container(voice_like(1.0, 48_000), 48_000, container, codec)
    for size in (12, 40, len(data) // 3, len(data) // 2):
        with contextlib.suppress(InvalidMediaError):
            assert read_audio(data[:size]).seconds < 1.1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    samples = voice_like(0.2)
    samples[1000] = value
    with pytest.raises(InvalidMediaError, match="NaN or infinite"):
        read_audio(encoded(samples, subtype="FLOAT"))
    with pytest.raises(InvalidMediaError, match="NaN or infinite"):
        to_codec_rate(Waveform(samples, 16_000))


def test_opposite_infinities_do_not_cancel() -> None:
    stereo = np.stack([voice_like(0.1), voice_like(0.1)], axis=1)
    stereo[5] = (np.inf, -np.inf)
    with pytest.raises(InvalidMediaError, match="NaN or infinite"):
        read_audio(encoded(stereo, subtype="FLOAT"))


def test_samples_beyond_full_scale_are_scaled_to_their_peak() -> None:
    waveform = read_audio(encoded(voice_like(0.2) * 1e4, subtype="FLOAT"))
    assert np.abs(waveform.samples).max() == pytest.approx(1.0)


def test_zero_seconds_are_refused() -> None:
    with pytest.raises(InvalidMediaError, match="no samples"):
        read_audio(encoded(np.zeros(0, np.float32)))
    with pytest.raises(InvalidMediaError, match="no samples"):
        to_codec_rate(Waveform(np.zeros(0, np.float32), 16_000))


def test_one_sample_is_enough() -> None:
    assert len(read_audio(encoded(np.zeros(1, np.float32))).samples) == 1


@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        (Limits(bytes=1000), "bytes"),
        (Limits(seconds=0.5), "lasts 1.0 s"),
        (Limits(samples=8000), "16,000 samples"),
        (Limits(channels=1), "2 channels"),
    ],
)
def test_too_large_is_named(limits: Limits, fault: str) -> None:
    stereo = np.zeros((16_000, 2), np.float32)
    with pytest.raises(MediaTooLargeError, match=fault):
        read_audio(encoded(stereo), limits=limits)


@pytest.mark.parametrize("rate", [999, 400_000])
def test_impossible_rates_are_refused(rate: int) -> None:
    with pytest.raises(InvalidMediaError, match="sample rate"):
        read_audio(encoded(voice_like(0.1), rate))


def test_a_header_that_promises_hours_is_refused_before_reading() -> None:
    data = bytearray(encoded(voice_like(0.2), container="FLAC"))
    # STREAMINFO: 36 bits of total samples end at byte 26.
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4
    with pytest.raises(MediaTooLargeError, match="limit is 600 s"):
        read_audio(bytes(data))


def test_a_small_file_that_unfolds_is_stopped() -> None:
    silence = encoded(np.zeros(700 * 16_000, np.float32), container="FLAC")
    assert len(silence) < 2_000_000
    with pytest.raises(MediaTooLargeError):
        read_audio(silence)


def test_wav_written_to_a_pipe_is_read() -> None:
    data = bytearray(encoded(voice_like(0.5)))
    data[4:8] = data[40:44] = struct.pack("<I", 0xFFFFFFFF)
    assert read_audio(bytes(data)).seconds == pytest.approx(0.5)


@pytest.mark.parametrize("content_type", ["image/png", "text/plain", "application/json"])
def test_content_types_of_no_sound(content_type: str) -> None:
    with pytest.raises(UnsupportedMediaError, match=content_type):
        read_audio(encoded(voice_like(0.1)), content_type)


@pytest.mark.parametrize(
    "data", [b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"]
)
def test_playlists_are_not_followed(data: bytes) -> None:
    with pytest.raises(InvalidMediaError):
        read_audio(data)


@pytest.mark.parametrize("path", ODD_FILES, ids=lambda path: path.stem)
def test_odd_wav_files_give_sound_or_a_clear_error(path: Path) -> None:
    try:
        waveform = read_audio(path.read_bytes(), "audio/wav")
    except ErnieMultiError as error:
        assert 400 <= error.status < 500
    else:
        assert len(waveform.samples) > 0
        assert np.isfinite(waveform.samples).all()


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"RIFF", b"OggS", b"fLaC", b"\x1a\x45\xdf\xa3", b"\0\0\0\x18ftyp", b"\xff\xf1"]),
)
def test_noise_gives_a_clear_error(noise: bytes, start: bytes) -> None:
    try:
        waveform = read_audio(start + noise)
    except ErnieMultiError as error:
        assert 400 <= error.status < 500
    else:
        assert np.isfinite(waveform.samples).all()


@given(st.integers(0, 1 << 12), st.integers(1, 255), st.sampled_from(["WAV", "FLAC", "OGG", "MP3"]))
def test_a_flipped_byte_gives_sound_or_a_clear_error(position: int, flip: int, container: str) -> None:
    data = bytearray(FILES[container])
    data[position % len(data)] ^= flip
    try:
        waveform = read_audio(bytes(data))
    except ErnieMultiError as error:
        assert 400 <= error.status < 500
    else:
        assert np.isfinite(waveform.samples).all()


FILES = {
    container: encoded(voice_like(0.3), container=container) for container in ("WAV", "FLAC", "OGG", "MP3")
}


@pytest.mark.parametrize("content_type", [None, "audio/wav", "audio/flac", "audio/ogg"])
def test_written_files_read_back(content_type: str | None) -> None:
    samples = voice_like(1.0)
    data, given_type = write_audio(Waveform(samples, 16_000), content_type)
    assert given_type == (content_type or "audio/wav")
    again = read_audio(data, given_type)
    assert len(again.samples) == len(samples)
    if given_type != "audio/ogg":
        np.testing.assert_allclose(again.samples, samples, atol=1e-4)
    if given_type == "audio/wav":
        assert soundfile.info(io.BytesIO(data)).subtype == "PCM_16"


def test_writing_an_unknown_type_is_refused() -> None:
    with pytest.raises(UnsupportedMediaError, match="audio/midi"):
        write_audio(Waveform(voice_like(0.1), 16_000), "audio/midi")
