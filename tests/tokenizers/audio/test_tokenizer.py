"""The tokenizer as services use it: exact lengths, equal codes in any company, errors instead of crashes."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from ernie5.protocol.errors import (
    InvalidInputError,
    InvalidMediaError,
    MediaTooLargeError,
    TokenizerMismatchError,
    UnsupportedMediaError,
)
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import CodebooksLayout, TokenSpan
from ernie5.tokenizers.audio.codec import MelCodec
from ernie5.tokenizers.audio.mel import log_mel
from ernie5.tokenizers.audio.preprocessing import Waveform
from ernie5.tokenizers.audio.storage import CODEC_FILE, SHIPPED, VOCODER_FILE, publish
from ernie5.tokenizers.audio.tokenizer import AudioTokenizer
from ernie5.tokenizers.audio.vocoder import Vocoder
from ernie5.tokenizers.base import Medium, Tokenizer
from tests.tokenizers.audio.clips import encoded, voice_like


@pytest.fixture(scope="module")
def tokenizer() -> AudioTokenizer:
    return AudioTokenizer.load()


def test_it_is_a_tokenizer(tokenizer: AudioTokenizer) -> None:
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.modalities == ("speech", "sound")


def test_shipped_weights_are_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.glob("*.safetensors")) < 10_000_000


@pytest.mark.parametrize("samples", [1, 159, 1280, 1281, 16_000, 20_001])
def test_length_is_restored_exactly(tokenizer: AudioTokenizer, samples: int) -> None:
    span = tokenizer.encode(Waveform(voice_like(2.0)[:samples], 16_000))
    assert span.codes.shape == (-(-samples // 1280), 8)
    assert span.layout == CodebooksLayout(256, 8, 12.5, 16_000.0, samples)
    decoded = tokenizer.decode(span)
    assert decoded.samples.shape == (samples,)
    assert decoded.samples.dtype == np.float32
    assert np.abs(decoded.samples).max() <= 1.0


def test_bytes_of_another_rate_and_channels(tokenizer: AudioTokenizer) -> None:
    samples = voice_like(1.0, 44_100)
    data = encoded(np.stack([samples, samples], axis=1), 44_100)
    span = tokenizer.encode(data, modality="sound", content_type="audio/wav")
    assert span.modality == "sound"
    assert isinstance(span.layout, CodebooksLayout)
    assert (span.layout.channels, span.layout.samples) == (2, 16_000)


def test_decoded_sound_resembles_the_original_and_more_levels_more(tokenizer: AudioTokenizer) -> None:
    samples = voice_like(1.28)
    original = log_mel(torch.from_numpy(samples))
    span = tokenizer.encode(Waveform(samples, 16_000))
    distances = [
        float((log_mel(torch.from_numpy(tokenizer.decode(span, levels).samples)) - original).abs().mean())
        for levels in (1, 4, 8)
    ]
    silence = float((log_mel(torch.zeros(len(samples))) - original).abs().mean())
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 0.4 * silence


def test_a_span_of_fewer_levels_decodes_as_its_prefix_does(tokenizer: AudioTokenizer) -> None:
    span = tokenizer.encode(Waveform(voice_like(0.7), 16_000))
    kept = TokenSpan(
        span.modality,
        dataclasses.replace(span.layout, levels=4),
        np.ascontiguousarray(span.codes[:, :4]),
        span.tokenizer,
    )
    assert np.array_equal(tokenizer.decode(kept).samples, tokenizer.decode(span, levels=4).samples)


def test_codes_do_not_depend_on_the_batch(tokenizer: AudioTokenizer) -> None:
    waveforms = [Waveform(voice_like(0.3 + 0.17 * i, seed=i), 16_000) for i in range(8)]
    alone = [tokenizer.encode(waveform) for waveform in waveforms]
    assert tokenizer.encode_batch(waveforms) == alone
    assert tokenizer.encode_batch(waveforms[::-1]) == alone[::-1]
    together = tokenizer.decode_batch(alone)
    for span, waveform in zip(alone, together):
        assert isinstance(waveform, Waveform)
        assert np.array_equal(tokenizer.decode(span).samples, waveform.samples)


def test_another_process_gives_the_same_codes_and_hash(tokenizer: AudioTokenizer) -> None:
    script = (
        "import json, sys, torch; torch.set_num_threads(int(sys.argv[1]))\n"
        "from ernie5.tokenizers.audio.tokenizer import AudioTokenizer\n"
        "tokenizer = AudioTokenizer.load()\n"
        "span = tokenizer.encode(sys.stdin.buffer.read())\n"
        "print(json.dumps([tokenizer.hash, span.codes.tolist()]))"
    )
    data = encoded(voice_like(1.1))
    threads = str(torch.get_num_threads())
    done = subprocess.run(
        [sys.executable, "-c", script, threads], input=data, capture_output=True, check=True, timeout=200
    )
    assert json.loads(done.stdout) == [tokenizer.hash, tokenizer.encode(data).codes.tolist()]


def test_segments_and_media(tokenizer: AudioTokenizer) -> None:
    good = encoded(voice_like(0.5))
    segments = [
        Segment(modality="speech", data=good, content_type="audio/wav"),
        Segment(modality="speech", data=good[:3000]),
        Segment(modality="speech", text="not a sound"),
        Segment(modality="image", data=good),
        Segment(modality="sound", reference="clips/meow.wav"),
        Segment(modality="sound", data=good, content_type="image/png"),
        Segment(modality="sound", data=good),
    ]
    results = tokenizer.encode_segments(segments)
    kinds = (
        TokenSpan, InvalidMediaError, InvalidMediaError, UnsupportedMediaError, InvalidMediaError,
        UnsupportedMediaError, TokenSpan,
    )  # fmt: skip
    assert [type(result) for result in results] == list(kinds)
    assert results[0] == tokenizer.encode(good)
    media = tokenizer.decode_spans([results[0]])
    assert isinstance(media[0], Medium)
    assert media[0].content_type == "audio/wav"
    info = soundfile.info(io.BytesIO(media[0].data))
    assert (info.subtype, info.samplerate, info.channels, info.frames) == ("PCM_16", 16_000, 1, 8000)
    assert isinstance(
        tokenizer.decode_spans([results[0]], content_type="image/png")[0], UnsupportedMediaError
    )


def test_a_span_of_another_tokenizer_is_refused(tokenizer: AudioTokenizer) -> None:
    span = dataclasses.replace(tokenizer.encode(Waveform(voice_like(0.2), 16_000)), tokenizer="0" * 32)
    with pytest.raises(TokenizerMismatchError, match=tokenizer.hash):
        tokenizer.decode(span)


@pytest.mark.parametrize(
    "change",
    [{"codebook_size": 512}, {"frame_rate": 25.0}, {"sample_rate": 8000.0}, {"samples": 5000}],
)
def test_layouts_that_do_not_fit_are_refused(tokenizer: AudioTokenizer, change: dict[str, float]) -> None:
    span = tokenizer.encode(Waveform(voice_like(0.2), 16_000))
    with pytest.raises(InvalidInputError):
        tokenizer.decode(dataclasses.replace(span, layout=dataclasses.replace(span.layout, **change)))


@pytest.mark.parametrize("levels", [0, 9])
def test_levels_that_are_not_there_are_refused(tokenizer: AudioTokenizer, levels: int) -> None:
    with pytest.raises(InvalidInputError, match=f"levels {levels}"):
        tokenizer.decode(tokenizer.encode(Waveform(voice_like(0.2), 16_000)), levels)


def test_generated_spans_of_any_codes_decode_to_finite_sound(tokenizer: AudioTokenizer) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (20, 8)).astype(np.int16)
    span = TokenSpan("speech", CodebooksLayout(256, 8, 12.5, 16_000.0, 20 * 1280), codes, tokenizer.hash)
    assert np.isfinite(tokenizer.decode(span).samples).all()


def test_an_empty_span_is_an_empty_sound_and_a_huge_one_is_refused(tokenizer: AudioTokenizer) -> None:
    empty = TokenSpan(
        "speech", CodebooksLayout(256, 8, 12.5, 16_000.0, 0), np.zeros((0, 8), np.int16), tokenizer.hash
    )
    assert len(tokenizer.decode(empty).samples) == 0
    frames = 8000
    huge = TokenSpan(
        "speech", CodebooksLayout(256, 8, 12.5, 16_000.0, 0), np.zeros((frames, 8), np.int16), tokenizer.hash
    )
    with pytest.raises(MediaTooLargeError, match="8000 frames"):
        tokenizer.decode(huge)


def test_hash_follows_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MelCodec.Config(widths=(8, 8, 8), latent=4)
    codec, vocoder = MelCodec(config), Vocoder(Vocoder.Config(width=8, blocks=1))
    publish(codec, tmp_path / CODEC_FILE)
    publish(vocoder, tmp_path / VOCODER_FILE)
    first = AudioTokenizer.load(tmp_path).hash
    assert AudioTokenizer.load(tmp_path).hash == first
    with torch.no_grad():
        codec.quantiser.codebooks[0, 0, 0] += 0.5
    publish(codec, tmp_path / CODEC_FILE)
    assert AudioTokenizer.load(tmp_path).hash != first


def test_missing_and_damaged_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=CODEC_FILE):
        AudioTokenizer.load(tmp_path)
    data = (SHIPPED / CODEC_FILE).read_bytes()
    (tmp_path / CODEC_FILE).write_bytes(data[: len(data) // 2])
    (tmp_path / VOCODER_FILE).write_bytes((SHIPPED / VOCODER_FILE).read_bytes())
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        AudioTokenizer.load(tmp_path)
    (tmp_path / CODEC_FILE).write_bytes((SHIPPED / VOCODER_FILE).read_bytes())
    with pytest.raises(ValueError, match="holds no MelCodec"):
        AudioTokenizer.load(tmp_path)
