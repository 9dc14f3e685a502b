"""Streams give what whole clips give, in time, and hold no more the longer they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError
from ernie5.tokenizers.audio.codec import MelCodec
from ernie5.tokenizers.audio.mel import log_mel
from ernie5.tokenizers.audio.preprocessing import Waveform
from ernie5.tokenizers.audio.streaming import (
    ENCODER_SAMPLES,
    FRAMES_AT_ONCE,
    HELD_SAMPLES,
    DecoderStream,
    EncoderStream,
    ResamplingStream,
    encode_blocks,
    encode_file,
)
from ernie5.tokenizers.audio.tokenizer import FRAME_SAMPLES, AudioTokenizer
from ernie5.tokenizers.audio.vocoder import Vocoder
from tests.tokenizers.audio.clips import encoded, voice_like


@pytest.fixture(scope="module")
def tokenizer() -> AudioTokenizer:
    """A small one whose convolutions speak."""
    torch.manual_seed(0)
    codec = MelCodec(MelCodec.Config(widths=(16, 24, 32), latent=16, levels=4, codebook_size=32))
    mels = log_mel(torch.stack([torch.from_numpy(voice_like(1.28, seed=seed)) for seed in range(16)]))
    codec.start(mels, torch.Generator().manual_seed(0), rounds=5)
    for layer in (codec.encoder[-1], codec.decoder[-1].conv):
        torch.nn.init.normal_(layer.weight, std=0.05)
    return AudioTokenizer(codec, Vocoder(Vocoder.Config(width=16, blocks=3)))


def in_blocks(samples: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    blocks, start, turn = [], 0, 0
    while start < len(samples):
        blocks.append(samples[start : start + sizes[turn % len(sizes)]])
        start, turn = start + len(blocks[-1]), turn + 1
    return blocks


@pytest.mark.parametrize("sizes", [(160,), (1, 700, 5000), (100_000,)])
@pytest.mark.parametrize("length", [1, 1279, 1280, 1281, 24_000])
def test_codes_are_those_of_the_whole_clip(
    tokenizer: AudioTokenizer, sizes: tuple[int, ...], length: int
) -> None:
    samples = voice_like(1.6)[:length]
    whole = tokenizer.encode(Waveform(samples, 16_000)).codes
    stream = EncoderStream(tokenizer)
    parts = [stream.push(block) for block in in_blocks(samples, sizes)]
    assert np.array_equal(np.concatenate([*parts, stream.finish()]), whole)
    assert stream.samples == length


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 7), (400,)])
@pytest.mark.parametrize("levels", [4, 2])
def test_sound_is_that_of_the_whole_span(
    tokenizer: AudioTokenizer, sizes: tuple[int, ...], levels: int
) -> None:
    span = tokenizer.encode(Waveform(voice_like(4.0), 16_000))
    whole = tokenizer.decode(span, levels).samples
    stream = DecoderStream(tokenizer)
    parts = [stream.push(block[:, :levels]) for block in in_blocks(span.codes, sizes)]
    samples = np.concatenate([*parts, stream.finish()])
    assert len(samples) == len(span.codes) * FRAME_SAMPLES
    np.testing.assert_allclose(samples[: len(whole)], whole, atol=2e-5)


def test_the_latency_is_the_stated_one(tokenizer: AudioTokenizer) -> None:
    samples = voice_like(1.0)
    stream = EncoderStream(tokenizer)
    assert len(stream.push(samples[: ENCODER_SAMPLES - 1])) == 0
    assert len(stream.push(samples[ENCODER_SAMPLES - 1 : ENCODER_SAMPLES])) == 1
    assert len(stream.push(samples[ENCODER_SAMPLES : ENCODER_SAMPLES + FRAME_SAMPLES])) == 1
    decoder = DecoderStream(tokenizer)
    codes = tokenizer.encode(Waveform(samples, 16_000)).codes
    assert len(decoder.push(codes[:1])) == FRAME_SAMPLES - HELD_SAMPLES
    assert len(decoder.push(codes[1:2])) == FRAME_SAMPLES
    assert len(decoder.finish()) == HELD_SAMPLES


@pytest.mark.parametrize("rate", [8000, 22_050, 24_000, 44_100, 48_000, 47_951])
def test_any_rate_is_resampled_as_a_whole_clip_is(tokenizer: AudioTokenizer, rate: int) -> None:
    samples = voice_like(1.1, rate)
    whole = tokenizer.encode(Waveform(samples, rate))
    stream = EncoderStream(tokenizer, rate)
    parts = [stream.push(block) for block in in_blocks(samples, (997, 4001))]
    codes = np.concatenate([*parts, stream.finish()])
    assert stream.samples == whole.layout.samples
    assert np.mean(codes == whole.codes) > 0.98
    resampler = ResamplingStream(rate)
    pieces = [resampler.push(block) for block in in_blocks(samples, (997, 4001))]
    from ernie5.tokenizers.audio.preprocessing import to_codec_rate

    expected = to_codec_rate(Waveform(samples, rate)).samples
    np.testing.assert_allclose(np.concatenate([*pieces, resampler.finish()]), expected, atol=1e-5)


def test_what_a_stream_holds_does_not_grow(tokenizer: AudioTokenizer) -> None:
    def held(stream: EncoderStream | DecoderStream) -> int:
        return sum(value.numel() for value in vars(stream).values() if isinstance(value, torch.Tensor))

    encoder, decoder = EncoderStream(tokenizer), DecoderStream(tokenizer)
    sizes = []
    for second in range(12):
        decoder.push(encoder.push(voice_like(2.0, seed=second)))
        sizes.append((held(encoder), held(decoder)))
    assert max(sizes[4:]) <= tuple(1.3 * size for size in max(sizes[:4]))


def test_files_are_encoded_in_blocks(tokenizer: AudioTokenizer, tmp_path: Path) -> None:
    samples = voice_like(9.0, 24_000)
    stereo = np.stack([samples, samples], axis=1)
    soundfile.write(tmp_path / "long.wav", stereo, 24_000)
    parts = list(encode_file(tokenizer, tmp_path / "long.wav"))
    assert len(parts) > 2
    whole = tokenizer.encode((tmp_path / "long.wav").read_bytes()).codes
    assert np.mean(np.concatenate(parts) == whole) > 0.98
    (tmp_path / "cut.wav").write_bytes(encoded(samples)[:30])
    with pytest.raises(InvalidMediaError):
        list(encode_file(tokenizer, tmp_path / "cut.wav"))


def in_memory(samples: np.ndarray, rate: int, *sizes: int) -> Callable[[], Iterator[Waveform]]:
    return lambda: iter([Waveform(block, rate) for block in in_blocks(samples, sizes)])


@pytest.mark.parametrize("length", [1, 1281, 16_000])
def test_short_clips_are_encoded_as_one(tokenizer: AudioTokenizer, length: int) -> None:
    samples = voice_like(1.0)[:length]
    span = tokenizer.encode(Waveform(samples, 16_000))
    padded = F.pad(torch.from_numpy(samples), (0, -length % FRAME_SAMPLES))
    with torch.inference_mode():
        latent = tokenizer.codec.to_latent(log_mel(padded)[None])
        codes = tokenizer.codec.codes_of(latent)[0]
    assert np.array_equal(span.codes, codes.numpy())
    assert np.array_equal(span.features["codec"][:, 0], latent[0].T.numpy().astype(np.float16))


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_a_long_clip_is_encoded_alike_wherever_its_blocks_end(tokenizer: AudioTokenizer, rate: int) -> None:
    samples = np.tile(voice_like(4.0, rate), 6)
    samples *= np.linspace(0.2, 1.0, len(samples), dtype=np.float32)
    assert len(samples) / rate * 12.5 > FRAMES_AT_ONCE
    whole = encode_blocks(tokenizer, in_memory(samples, rate, len(samples)))
    for sizes in ((1024,), (65_536,), (7, 50_001)):
        parts = encode_blocks(tokenizer, in_memory(samples, rate, *sizes))
        assert np.array_equal(parts.frames.codes, whole.frames.codes)
        assert np.array_equal(parts.frames.latent, whole.frames.latent)
    assert np.array_equal(tokenizer.encode(Waveform(samples, rate)).codes, whole.frames.codes)


def test_a_loud_clip_is_scaled_by_its_loudest_sample_wherever_that_is(tokenizer: AudioTokenizer) -> None:
    samples = voice_like(9.0)
    samples[-50] = 0.9
    plain = tokenizer.encode(Waveform(samples / np.float32(0.9), 16_000))
    loud = encoded(samples * np.float32(4), subtype="FLOAT")
    quiet_scaled = tokenizer.encode(loud)
    assert np.mean(quiet_scaled.codes == plain.codes) > 0.98
    clipped = tokenizer.encode(Waveform(np.clip(samples * 4, -1, 1), 16_000))
    assert np.mean(quiet_scaled.codes == clipped.codes) < 0.9


def test_a_whole_clip_is_never_held(tokenizer: AudioTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    original = EncoderStream._encoded

    def watched(stream: EncoderStream, audio: torch.Tensor) -> object:
        nonlocal longest
        longest = max(longest, len(audio))
        return original(stream, audio)

    monkeypatch.setattr(EncoderStream, "_encoded", watched)
    span = tokenizer.encode(encoded(np.tile(voice_like(5.0), 14)))
    assert len(span.codes) == 875
    assert longest <= 2 * FRAMES_AT_ONCE * FRAME_SAMPLES


def test_bad_input_is_refused_and_takes_nothing_in(tokenizer: AudioTokenizer) -> None:
    stream = EncoderStream(tokenizer)
    for bad in (np.array([0.0, np.nan]), np.array([1, 2]), np.zeros((2, 2, 2))):
        with pytest.raises(InvalidMediaError):
            stream.push(bad)
    with pytest.raises(InvalidMediaError, match="no samples"):
        stream.finish()
    with pytest.raises(InvalidInputError, match="ended"):
        stream.push(np.zeros(3))
    with pytest.raises(InvalidInputError, match="sample rate"):
        EncoderStream(tokenizer, 10)
    decoder = DecoderStream(tokenizer)
    for codes in (np.zeros((2, 5), int), np.zeros(3, int), np.full((1, 4), 32), np.zeros((1, 4))):
        with pytest.raises(InvalidInputError):
            decoder.push(codes)
    assert len(decoder.finish()) == 0
