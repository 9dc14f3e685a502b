"""Encoding sound while it arrives and sounding codes while they are generated.

    encoder = EncoderStream(tokenizer, sample_rate=48_000)
    for block in microphone:
        codes = encoder.push(block)         # int16 [frames, levels]; often none, sometimes several
    codes = encoder.finish()

Everything in the codec is causal, so a stream keeps the few frames that the next one depends on and
computes these again; what it holds does not grow. Its codes and samples are those of the whole clip, up to
the rounding of differently sized matrix products. Whole clips go through a stream too
(:func:`encode_blocks`), ``FRAMES_AT_ONCE`` frames at a time wherever blocks end, so that their codes depend
on the samples alone.

Latency, beside the time that the computation takes: a frame's codes come ``ENCODER_SAMPLES`` = 1,440 samples
(90 ms) after its first sample, 80 ms of which are the frame itself and 10 the rest of an analysis window;
other rates than 16 kHz add half a resampling filter. A frame of codes gives its 80 ms of sound at once but
for the last ``HELD_SAMPLES`` = 320 samples (20 ms), which the next frame's windows overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from torch import Tensor

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError
from ernie5.tokenizers.audio.codec import FRAME
from ernie5.tokenizers.audio.mel import FFT, HOP, SAMPLE_RATE, WINDOW, framed_log_mel
from ernie5.tokenizers.audio.preprocessing import Waveform, resampling_ratio
from ernie5.tokenizers.audio.vocoder import PHASE_PERIOD

if TYPE_CHECKING:
    from ernie5.tokenizers.audio.tokenizer import AudioTokenizer

FRAME_SAMPLES = FRAME * HOP
ENCODER_SAMPLES = FRAME_SAMPLES - HOP + WINDOW // 2
HELD_SAMPLES = WINDOW // 2
_EDGE = FFT // 2
_BLOCK = 1 << 16
# Latent frames computed at once, 20 s: what a long clip or push may need of memory.
FRAMES_AT_ONCE = 250


class ResamplingStream:
    """Samples of any rate to 16 kHz, block by block, as :func:`scipy.signal.resample_poly` does at once."""

    def __init__(self, rate: int) -> None:
        ratio = resampling_ratio(rate)
        self.up, self.down = ratio.numerator, ratio.denominator
        # The filter's half, in input samples, up to whole periods of the two rates.
        reach = 10 * max(self.up, self.down) // self.up + 1
        self.context = -(-reach // self.down) * self.down
        self.held = np.zeros(0, np.float32)
        self.before = 0  # held samples that have been resampled already

    def push(self, samples: np.ndarray) -> np.ndarray:
        """The samples at 16 kHz that are final, float32 ``[n]``."""
        if self.up == self.down:
            return samples
        self.held = np.concatenate([self.held, samples])
        ready = (len(self.held) - self.before - self.context) // self.down * self.down
        return self._resampled(ready) if ready > 0 else np.zeros(0, np.float32)

    def finish(self) -> np.ndarray:
        """The rest."""
        left = len(self.held) - self.before
        return self._resampled(left) if left and self.up != self.down else np.zeros(0, np.float32)

    def _resampled(self, count: int) -> np.ndarray:
        from scipy.signal import resample_poly

        made = resample_poly(self.held, self.up, self.down)
        first = self.before * self.up // self.down
        # As many as scipy gives for a whole clip: the last, incomplete period is rounded up.
        out = made[first : first + -(-count * self.up // self.down)]
        kept = max(0, self.before + count - self.context)
        self.held, self.before = self.held[kept:], self.before + count - kept
        return np.clip(out, -1.0, 1.0).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Frames:
    """Successive frames: ``codes`` int16 ``[frames, levels]``, ``latent`` float32 ``[frames, D]``."""

    codes: np.ndarray
    latent: np.ndarray

    @classmethod
    def joined(cls, parts: Iterable[Frames]) -> Frames:
        """One after the other; at least one part."""
        codes, latents = zip(*((part.codes, part.latent) for part in parts))
        return cls(np.concatenate(codes), np.concatenate(latents))


class EncoderStream:
    """Samples in, codes out; see the module's text.

    Attributes:
        samples: how many samples at 16 kHz have come in.
    """

    def __init__(
        self, tokenizer: AudioTokenizer, sample_rate: int = SAMPLE_RATE, *, frames_at_once: int = 1
    ) -> None:
        """For sound of ``sample_rate``.

        Args:
            tokenizer: whose codes they are.
            sample_rate: of the samples that come.
            frames_at_once: frames wait until there are so many: one gives them as early as can be, more are
                computed faster.

        Raises:
            InvalidInputError: a rate beyond the tokenizer's limits.
        """
        limits = tokenizer.limits
        if not limits.lowest_rate <= sample_rate <= limits.highest_rate:
            raise InvalidInputError(
                f"sample rate {sample_rate} Hz is outside "
                f"{limits.lowest_rate:,} to {limits.highest_rate:,} Hz"
            )
        self.tokenizer = tokenizer
        self.samples = 0
        self._at_once = frames_at_once
        self._resampler = ResamplingStream(sample_rate)
        self._context = tokenizer.codec.encoder_context
        # Samples from the first that the next mel frame sees on; silence lies before the clip.
        self._audio = torch.zeros(_EDGE)
        self._mels = torch.zeros(0)
        self._finished = False

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Codes, int16 ``[frames, levels]``, of the frames that ``samples`` completes.

        Args:
            samples: float ``[n]`` or ``[n, channels]`` in [-1, 1] at the stream's rate; what lies beyond is
                cut, since a stream can't know its loudest sample.

        Raises:
            InvalidMediaError: NaN or infinite samples, or another shape; nothing was taken in.
            InvalidInputError: the stream has ended.
        """
        return self.push_frames(samples).codes

    def finish(self) -> np.ndarray:
        """Codes of what is left, the last frame filled with silence; the stream ends.

        Raises:
            InvalidMediaError: not one sample came in.
        """
        return self.finish_frames().codes

    def push_frames(self, samples: np.ndarray) -> Frames:
        """:meth:`push` with the latent beside the codes."""
        if self._finished:
            raise InvalidInputError("the stream has ended; open another one")
        samples = np.asarray(samples)
        if samples.dtype.kind != "f" or samples.ndim not in (1, 2):
            raise InvalidMediaError(
                f"samples are float [n] or [n, channels], got {samples.dtype} {samples.shape}"
            )
        if not np.isfinite(samples).all():
            raise InvalidMediaError("the audio holds NaN or infinite samples")
        mono = samples.mean(axis=1) if samples.ndim == 2 else samples
        return self._take(self._resampler.push(np.clip(mono, -1.0, 1.0).astype(np.float32)))

    def finish_frames(self) -> Frames:
        """:meth:`finish` with the latent beside the codes."""
        if self._finished:
            raise InvalidInputError("the stream has ended already")
        frames = self._take(self._resampler.finish())
        self._finished = True
        if not self.samples:
            raise InvalidMediaError("the audio has no samples")
        silence = -self.samples % FRAME_SAMPLES
        self._at_once = 1
        return Frames.joined([frames, self._encoded(F.pad(self._audio, (0, silence + _EDGE)))])

    def _take(self, samples: np.ndarray) -> Frames:
        self.samples += len(samples)
        found = [self._no_frames()]
        for start in range(0, len(samples), FRAMES_AT_ONCE * FRAME_SAMPLES):
            part = torch.from_numpy(samples[start : start + FRAMES_AT_ONCE * FRAME_SAMPLES].copy())
            self._audio = torch.cat([self._audio, part])
            found.append(self._encoded(self._audio))
        return Frames.joined(found)

    def _no_frames(self) -> Frames:
        config = self.tokenizer.codec.config
        return Frames(
            np.zeros((0, self.tokenizer.levels), np.int16), np.zeros((0, config.latent), np.float32)
        )

    @torch.inference_mode()
    def _encoded(self, audio: Tensor) -> Frames:
        """The frames that ``audio`` holds whole; forgets what no later frame needs."""
        tokenizer = self.tokenizer
        # The window is narrower than the transform, whose outer values it multiplies by zero.
        spare = (FFT - WINDOW) // 2
        frames = max(0, (len(audio) + spare - FFT) // HOP + 1) // FRAME // self._at_once * self._at_once
        if not frames:
            return self._no_frames()
        needed = (frames * FRAME - 1) * HOP + FFT
        piece = F.pad(audio, (0, max(0, needed - len(audio))))[:needed].to(tokenizer.device)
        mels = framed_log_mel(piece)
        self._audio = audio[frames * FRAME_SAMPLES :].clone()
        seen = torch.cat([self._mels.to(mels.device).view(mels.shape[0], -1), mels], dim=-1)
        latent = tokenizer.codec.to_latent(seen[None])[..., -frames:]
        self._mels = seen[:, -self._context * FRAME :].clone()
        codes = tokenizer.codec.codes_of(latent)[0]
        return Frames(codes.cpu().numpy().astype(np.int16), latent[0].T.cpu().numpy())


class DecoderStream:
    """Codes in, samples at 16 kHz out; see the module's text."""

    def __init__(self, tokenizer: AudioTokenizer) -> None:
        self.tokenizer = tokenizer
        codec, vocoder = tokenizer.codec, tokenizer.vocoder
        self._latent_context = codec.decoder_context
        # The windows of neighbours overlap too: WINDOW // HOP frames.
        self._mel_context = vocoder.context + WINDOW // HOP
        self._latent = torch.zeros(0)
        self._mels = torch.zeros(0)
        self._first = 0  # the mel frame that self._mels starts with
        self._sounded = 0  # samples given out
        self._finished = False

    def push(self, codes: np.ndarray) -> np.ndarray:
        """Samples, float32 ``[n]``, that ``codes`` (integer ``[frames, levels]``) make final.

        Fewer levels than the tokenizer's are allowed.

        Raises:
            InvalidInputError: other shapes or values, or the stream has ended.
        """
        if self._finished:
            raise InvalidInputError("the stream has ended; open another one")
        config = self.tokenizer.codec.config
        codes = np.asarray(codes)
        if codes.dtype.kind not in "iu" or codes.ndim != 2 or not 1 <= codes.shape[1] <= config.levels:
            raise InvalidInputError(
                f"codes are integers [frames, 1 to {config.levels} levels], got {codes.dtype} {codes.shape}"
            )
        if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < config.codebook_size:
            raise InvalidInputError(
                f"codes lie in 0 to {config.codebook_size - 1}, got {codes.min()} to {codes.max()}"
            )
        parts = [
            self._push(codes[start : start + FRAMES_AT_ONCE].astype(np.int64))
            for start in range(0, len(codes), FRAMES_AT_ONCE)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def finish(self) -> np.ndarray:
        """The last ``HELD_SAMPLES`` samples, or none where no codes came; the stream ends."""
        if self._finished:
            raise InvalidInputError("the stream has ended already")
        self._finished = True
        return self._sound(last=True) if len(self._mels) else np.zeros(0, np.float32)

    @torch.inference_mode()
    def _push(self, codes: np.ndarray) -> np.ndarray:
        codec = self.tokenizer.codec
        latent = codec.quantiser.decode(torch.from_numpy(codes)[None].to(self.tokenizer.device))
        seen = torch.cat([self._latent.to(latent.device), latent], dim=-1) if len(self._latent) else latent
        mels = codec.from_latent(seen)[..., -len(codes) * FRAME :]
        mels = codec.floored(mels)
        self._latent = seen[..., -self._latent_context :].clone()
        self._mels = torch.cat([self._mels.to(mels.device), mels], dim=-1) if len(self._mels) else mels
        return self._sound(last=False)

    @torch.inference_mode()
    def _sound(self, *, last: bool) -> np.ndarray:
        frames = self._first + self._mels.shape[-1]
        end = frames * HOP - (0 if last else HELD_SAMPLES)
        samples = self.tokenizer.vocoder(self._mels)[0]
        offset = self._first * HOP
        out = samples[self._sounded - offset : end - offset].clamp(-1.0, 1.0).cpu().numpy()
        self._sounded = end
        # A chunk starts where every frequency's phase is back at its start.
        first = max(0, end // HOP - self._mel_context) // PHASE_PERIOD * PHASE_PERIOD
        self._mels = self._mels[..., first - self._first :].clone()
        self._first = first
        return out


@dataclass(frozen=True, slots=True)
class EncodedClip:
    """The frames of a whole clip, its length in samples at 16 kHz and the channels it had."""

    frames: Frames
    samples: int
    channels: int


def encode_blocks(tokenizer: AudioTokenizer, blocks: Callable[[], Iterator[Waveform]]) -> EncodedClip:
    """The frames of a clip that comes in blocks, in memory that does not grow with it (but for its frames).

    As in :func:`~ernie5.tokenizers.audio.preprocessing.to_codec_rate` a clip with samples beyond +-1 is
    scaled to its peak; since this shows when it is reached, such a clip is read twice.

    Args:
        tokenizer: whose frames they are.
        blocks: gives the clip's mono blocks, all of one rate, each time from the start.

    Raises:
        InvalidMediaError: NaN or infinite samples, or none at all.
    """
    peak = np.float32(1.0)
    while True:
        stream: EncoderStream | None = None
        found: list[Frames] = []
        loudest, channels = peak, 1
        for block in blocks():
            if stream is None:
                stream = EncoderStream(tokenizer, block.sample_rate, frames_at_once=FRAMES_AT_ONCE)
                channels = block.channels
            highest = np.abs(block.samples).max(initial=0.0)
            if not np.isfinite(highest):
                raise InvalidMediaError("the audio holds NaN or infinite samples")
            loudest = max(loudest, highest)
            # Once louder, only the peak is still to be found.
            if loudest == peak:
                frames = stream.push_frames(block.samples / peak)
                # Nothing small is kept between large passing arrays: it would hold the allocator's heap open.
                if len(frames.codes):
                    found.append(frames)
        if stream is None:
            raise InvalidMediaError("the audio has no samples")
        if loudest == peak:
            found.append(stream.finish_frames())
            return EncodedClip(Frames.joined(found), stream.samples, channels)
        peak = loudest


def encode_file(tokenizer: AudioTokenizer, path: Path) -> Iterator[np.ndarray]:
    """Codes, int16 ``[frames, levels]``, of an audio file of any length, read and encoded in blocks.

    Raises:
        InvalidMediaError: libsndfile can't read the file, or it ends before the length it declares.
    """
    try:
        with soundfile.SoundFile(path) as file:
            stream = EncoderStream(tokenizer, file.samplerate)
            size = max(1, _BLOCK // file.channels)
            read = 0
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                read += len(block)
                yield stream.push(block)
            if read < file.frames < 2**62:
                raise InvalidMediaError(
                    f"the audio is truncated: {file.frames:,} samples declared, {read:,} readable"
                )
            yield stream.finish()
    except soundfile.LibsndfileError as error:
        raise InvalidMediaError(f"the audio can't be decoded: {error.error_string}") from error
