"""Odd sounds through the audio tokenizer: rates, channels, values and lengths."""

from __future__ import annotations

import io
from collections.abc import Callable

import av
import numpy as np
import pytest

from tests.tokenizers.hostile.files import sound_file, tone
from tests.tokenizers.hostile.worker import Reply

Tokenise = Callable[..., Reply]


@pytest.mark.parametrize("rate", [1_000, 7_919, 8_000, 11_025, 22_050, 37_800, 47_951, 96_000, 384_000])
def test_odd_rates_are_tokenised(tokenise: Tokenise, rate: int) -> None:
    assert tokenise("sound", sound_file(tone(0.3, rate, 200), rate)).outcome == "tokens"


@pytest.mark.parametrize("rate", [1, 999, 2_822_400])
def test_impossible_rates_are_refused(tokenise: Tokenise, rate: int) -> None:
    assert "sample rate" in tokenise("sound", sound_file(tone(0.1), rate)).message


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
@pytest.mark.parametrize("channels", [2, 6, 8])
def test_channels_are_mixed(tokenise: Tokenise, kind: str, channels: int) -> None:
    mono = tone()
    many = tokenise("speech", sound_file(np.repeat(mono[:, None], channels, axis=1), kind=kind))
    assert many.outcome == "tokens"
    if kind != "OGG":  # which codes channels together, with losses
        assert many.codes == tokenise("speech", sound_file(mono, kind=kind)).codes


def test_5_1_in_mp4_is_tokenised(tokenise: Tokenise) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=48_000, layout="5.1")
        planes = np.repeat(tone(0.5, 48_000)[None], 6, axis=0)
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout="5.1")
        frame.sample_rate = 48_000
        resampler = av.AudioResampler(stream.format, "5.1", 48_000, frame_size=stream.frame_size or 1024)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    assert tokenise("sound", file.getvalue(), "audio/mp4").outcome == "tokens"


def test_too_many_channels_are_refused(tokenise: Tokenise) -> None:
    assert "33 channels" in tokenise("sound", sound_file(np.zeros((100, 33), np.float32))).message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE"])
def test_values_that_are_no_numbers_are_refused(tokenise: Tokenise, value: float, subtype: str) -> None:
    samples = tone()
    samples[100] = value
    assert "NaN or infinite" in tokenise("speech", sound_file(samples, subtype=subtype)).message


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_any_loudness_is_tokenised(tokenise: Tokenise, scale: float) -> None:
    assert tokenise("sound", sound_file(tone() * np.float32(scale), subtype="FLOAT")).outcome == "tokens"


@pytest.mark.parametrize("length", [1, 2, 7, 1_279, 1_280, 1_281, 16_000])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_silence_and_constants_of_any_length_are_tokenised(
    tokenise: Tokenise, length: int, value: float
) -> None:
    samples = np.full(length, value, np.float32)
    assert tokenise("speech", sound_file(samples, subtype="FLOAT")).outcome == "tokens"


def test_no_samples_are_refused(tokenise: Tokenise) -> None:
    assert "no samples" in tokenise("speech", sound_file(np.zeros(0, np.float32))).message


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "ULAW", "ALAW", "IMA_ADPCM", "DOUBLE"])
def test_number_formats_are_tokenised(tokenise: Tokenise, subtype: str) -> None:
    assert tokenise("speech", sound_file(tone(), subtype=subtype)).outcome == "tokens"
