"""Audio files to 16 kHz mono, refusing what is damaged, impossible or too large.

WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF and more are read by libsndfile; MP4, WebM, Matroska and ADTS AAC by
FFmpeg through PyAV. Which one is decided by the first bytes, and FFmpeg is told the container, so that no
input can make it open a playlist or an address.

A declared length is checked before anything of that size is allocated, and samples are read in blocks, mixed
to mono one by one, so that a small file can't unfold into gigabytes and a long one needs no more memory than
a short one (:func:`audio_blocks`).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import soundfile
from scipy.signal import resample_poly

from ernie5.protocol.errors import InvalidMediaError, MediaTooLargeError, UnsupportedMediaError
from ernie5.tokenizers.audio.mel import SAMPLE_RATE
from ernie5.tokenizers.audio.truncation import refuse_truncated

_BLOCK = 1 << 16
_CONTENT_TYPES = ("audio/", "video/", "application/ogg", "application/octet-stream")
# Resampling ratios of larger terms need filters of millions of taps; nearest ratios within this
# bound are off by less than one part in a million.
_LARGEST_TERM = 2_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What is accepted. ``samples`` bounds the length in source samples, whatever the rate."""

    bytes: int = 50 * 1024 * 1024
    seconds: float = 600.0
    samples: int = 600 * 48_000
    lowest_rate: int = 1_000
    highest_rate: int = 384_000
    channels: int = 32


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, eq=False)
class Waveform:
    """Mono samples, float32 ``[n]`` in [-1, 1], at ``sample_rate`` Hz.

    ``channels`` counts those of the source, before they were mixed.
    """

    samples: np.ndarray
    sample_rate: int
    channels: int = 1

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate


def read_audio(data: bytes, content_type: str | None = None, limits: Limits = DEFAULT_LIMITS) -> Waveform:
    """Decode, mix to mono and resample to 16 kHz.

    Raises:
        InvalidMediaError: as :func:`audio_blocks`, or NaN or infinite samples.
        UnsupportedMediaError, MediaTooLargeError: as :func:`audio_blocks`.
    """
    blocks = list(audio_blocks(data, content_type, limits))
    mono = np.concatenate([block.samples for block in blocks])
    return to_codec_rate(Waveform(mono, blocks[0].sample_rate, blocks[0].channels), limits)


def audio_blocks(
    data: bytes, content_type: str | None = None, limits: Limits = DEFAULT_LIMITS
) -> Iterator[Waveform]:
    """The sound of a file, mixed to mono, block by block at its own rate; at least one block.

    Raises:
        UnsupportedMediaError: ``content_type`` names something that is no sound.
        InvalidMediaError: empty, truncated, undecodable or without samples. Damage shows when it is reached.
        MediaTooLargeError: more bytes, seconds or channels than ``limits``.
    """
    if content_type and not content_type.lower().startswith(_CONTENT_TYPES):
        raise UnsupportedMediaError(
            f"content type {content_type!r} is no audio; send audio/wav, audio/ogg, audio/flac …"
        )
    if not data:
        raise InvalidMediaError("the audio is empty (0 bytes)")
    if len(data) > limits.bytes:
        raise MediaTooLargeError(f"the audio has {len(data):,} bytes; the limit is {limits.bytes:,}")
    refuse_truncated(data)
    container = _ffmpeg_container(data)
    yield from _read_ffmpeg(data, container, limits) if container else _read_sndfile(data, limits)


def waveform_blocks(waveform: Waveform, limits: Limits = DEFAULT_LIMITS) -> Iterator[Waveform]:
    """A waveform block by block, float32; raises as :func:`audio_blocks` for one beyond ``limits``."""
    samples, rate = _checked(waveform, limits)
    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK].astype(np.float32)
        yield Waveform(block, rate, waveform.channels)


def to_codec_rate(waveform: Waveform, limits: Limits = DEFAULT_LIMITS) -> Waveform:
    """A checked waveform at 16 kHz. Samples beyond +-1 (float files allow them) are scaled to the peak."""
    samples, rate = _checked(waveform, limits)
    samples = samples.astype(np.float32)
    peak = float(np.abs(samples).max())
    if not np.isfinite(peak):
        raise InvalidMediaError("the audio holds NaN or infinite samples")
    if peak > 1.0:
        samples = samples / np.float32(peak)
    if rate != SAMPLE_RATE:
        ratio = resampling_ratio(rate)
        samples = resample_poly(samples, ratio.numerator, ratio.denominator).astype(np.float32)
        np.clip(samples, -1.0, 1.0, out=samples)
    return Waveform(samples, SAMPLE_RATE, waveform.channels)


def _checked(waveform: Waveform, limits: Limits) -> tuple[np.ndarray, int]:
    samples, rate = np.asarray(waveform.samples), int(waveform.sample_rate)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise InvalidMediaError(f"a waveform is float [n], got {samples.dtype} {samples.shape}")
    _check_header(rate, waveform.channels, len(samples), limits)
    if not len(samples):
        raise InvalidMediaError("the audio has no samples")
    return samples, rate


def resampling_ratio(rate: int) -> Fraction:
    """16 kHz over ``rate``, in terms small enough for a filter."""
    ratio = Fraction(SAMPLE_RATE, rate)
    if max(ratio.numerator, ratio.denominator) > _LARGEST_TERM:
        ratio = ratio.limit_denominator(_LARGEST_TERM)
    return ratio


def write_audio(waveform: Waveform, content_type: str | None = None) -> tuple[bytes, str]:
    """Encode mono samples; returns the bytes and their content type (``audio/wav``, 16-bit PCM, by default).

    Raises:
        UnsupportedMediaError: a content type other than ``audio/wav``, ``audio/flac`` and ``audio/ogg``.
    """
    asked = (content_type or "audio/wav").split(";")[0].strip().lower()
    formats = {
        "audio/wav": ("WAV", "PCM_16"),
        "audio/x-wav": ("WAV", "PCM_16"),
        "audio/flac": ("FLAC", "PCM_16"),
        "audio/ogg": ("OGG", "VORBIS"),
        "audio/*": ("WAV", "PCM_16"),
        "*/*": ("WAV", "PCM_16"),
    }
    if asked not in formats:
        raise UnsupportedMediaError(
            f"can't write {asked!r}; choose among audio/wav, audio/flac and audio/ogg"
        )
    container, encoding = formats[asked]
    file = io.BytesIO()
    soundfile.write(
        file, np.clip(waveform.samples, -1.0, 1.0), waveform.sample_rate, encoding, format=container
    )
    return file.getvalue(), {"WAV": "audio/wav", "FLAC": "audio/flac", "OGG": "audio/ogg"}[container]


def _check_header(rate: int, channels: int, samples: int, limits: Limits) -> None:
    if not limits.lowest_rate <= rate <= limits.highest_rate:
        raise InvalidMediaError(
            f"sample rate {rate} Hz is outside {limits.lowest_rate:,} to {limits.highest_rate:,} Hz"
        )
    if not 1 <= channels <= limits.channels:
        raise MediaTooLargeError(f"the audio has {channels} channels; the limit is {limits.channels}")
    if samples > limits.seconds * rate:
        raise MediaTooLargeError(
            f"the audio lasts {samples / rate:,.1f} s; the limit is {limits.seconds:,.0f} s; split it"
        )
    if samples > limits.samples:
        raise MediaTooLargeError(
            f"the audio has {samples:,} samples a channel; the limit is {limits.samples:,}; "
            "resample or split it"
        )


def _ffmpeg_container(data: bytes) -> str | None:
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if len(data) >= 2 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0:  # ADTS: sync word, layer 0
        return "aac"
    return None


def _read_sndfile(data: bytes, limits: Limits) -> Iterator[Waveform]:
    read = 0
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, channels, declared = file.samplerate, file.channels, file.frames
            exact = file.format in ("WAV", "WAVEX", "RF64", "FLAC", "AIFF", "W64", "CAF", "AU")
            unknown = declared >= 2**62
            _check_header(rate, channels, 0 if unknown else declared, limits)
            for block in _mixed(_blocks(file), rate, channels, limits):
                read += len(block.samples)
                yield block
    except soundfile.LibsndfileError as error:
        raise InvalidMediaError(f"the audio can't be decoded: {_reason(error)}") from error
    if exact and not unknown and read < declared:
        raise InvalidMediaError(f"the audio is truncated: {declared:,} samples declared, {read:,} readable")


def _reason(error: soundfile.LibsndfileError) -> str:
    """What libsndfile says, where that is of use to who sent the file."""
    said = str(error.error_string).strip()
    if said.startswith("Format not recognised"):
        return "it is no WAV, FLAC, Ogg, MP3, AIFF, CAF, AU, MP4, WebM, Matroska or ADTS file; convert it"
    # A file in memory is no pipe and has a name of its own: these are what damage looks like from inside.
    if said.startswith(("File does not exist", "Unspecified internal", "System error", "Internal psf")):
        return "it is damaged or holds no sound"
    return said


def _blocks(file: soundfile.SoundFile) -> Iterator[np.ndarray]:
    # Fewer frames a block for many channels; a zero-length read is the end.
    size = max(1, _BLOCK // file.channels)
    while len(block := file.read(size, dtype="float32", always_2d=True)):
        yield block


def _read_ffmpeg(data: bytes, container: str, limits: Limits) -> Iterator[Waveform]:
    import av  # imports slowly, and most sounds are not in these containers

    try:
        with av.open(io.BytesIO(data), mode="r", format=container) as file:
            if not file.streams.audio:
                raise InvalidMediaError("the file has no audio track")
            stream = file.streams.audio[0]
            rate, channels = int(stream.rate or 0), int(stream.channels or 0)
            seconds = (
                float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
            )
            _check_header(rate, channels, int(max(0.0, seconds) * rate), limits)
            resampler = av.AudioResampler(format="fltp")
            blocks = (
                out.to_ndarray().T
                for frame in file.decode(stream)
                for out in resampler.resample(frame)
                if out.sample_rate == rate and out.layout.nb_channels == channels
            )
            yield from _mixed(blocks, rate, channels, limits)
    except av.error.FFmpegError as error:
        raise InvalidMediaError(f"the audio can't be decoded: {error.strerror}") from error


def _mixed(blocks: Iterator[np.ndarray], rate: int, channels: int, limits: Limits) -> Iterator[Waveform]:
    """Mono blocks of blocks ``[n, channels]``; stops at the limits, whatever a header declared."""
    total = 0
    for block in blocks:
        total += len(block)
        _check_header(rate, channels, total, limits)
        # Mixing infinities of both signs gives NaN, which is refused like them.
        with np.errstate(invalid="ignore", over="ignore"):
            mono = block.mean(axis=1, dtype=np.float32)
        yield Waveform(mono, rate, channels)
    if not total:
        raise InvalidMediaError("the audio has no samples")
