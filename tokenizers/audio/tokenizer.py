"""The audio tokenizer: sounds to :class:`~ernie5.protocol.tokens.TokenSpan` objects and back.

    tokenizer = AudioTokenizer.load()
    span = tokenizer.encode(Path("meow.wav").read_bytes(), modality="sound")
    waveform = tokenizer.decode(span)

Every item is computed by itself, so its codes depend neither on its neighbours in a batch nor on which of
several equal processes computes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from ernie5.protocol.errors import (
    ErnieMultiError,
    InvalidInputError,
    InvalidMediaError,
    MediaTooLargeError,
    TokenizerMismatchError,
    UnsupportedMediaError,
)
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import CodebooksLayout, TokenSpan
from ernie5.tokenizers.audio.codec import FRAME, MelCodec
from ernie5.tokenizers.audio.mel import HOP, SAMPLE_RATE
from ernie5.tokenizers.audio.preprocessing import (
    DEFAULT_LIMITS,
    Limits,
    Waveform,
    audio_blocks,
    waveform_blocks,
    write_audio,
)
from ernie5.tokenizers.audio.storage import CODEC_FILE, SHIPPED, VOCODER_FILE, read_codec, read_vocoder
from ernie5.tokenizers.audio.streaming import encode_blocks
from ernie5.tokenizers.audio.vocoder import Vocoder
from ernie5.tokenizers.base import Medium

Result = TypeVar("Result")

FRAME_SAMPLES = FRAME * HOP
FRAME_RATE = SAMPLE_RATE / FRAME_SAMPLES

# Raised whenever the computation changes such that equal weights give other codes.
_REVISION = 3
FEATURE_ENCODER = "codec"


class AudioTokenizer:
    """Codec and vocoder on one device; see the module's text.

    Attributes:
        hash: of revision, configuration, weights, device kind and dtype (32 hex digits).
        levels: codes a frame that :meth:`encode` emits.
    """

    modalities: tuple[str, ...] = ("speech", "sound")

    def __init__(
        self,
        codec: MelCodec,
        vocoder: Vocoder,
        *,
        device: torch.device | str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.device = torch.device(device or "cpu")
        self.limits = limits
        self.codec = codec.to(self.device).eval().requires_grad_(False)
        self.vocoder = vocoder.to(self.device).eval().requires_grad_(False)
        self.levels = codec.config.levels
        self.hash = _hash_of(codec, vocoder, self.device)

    @classmethod
    def load(cls, path: Path | str | None = None, device: torch.device | str | None = None) -> AudioTokenizer:
        """The tokenizer in folder ``path`` (the shipped one by default), on the CPU by default.

        Raises:
            FileNotFoundError: the folder lacks the weights.
            ValueError: the weights are damaged or do not fit.
        """
        folder = Path(path) if path is not None else SHIPPED
        for name in (CODEC_FILE, VOCODER_FILE):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"no {name} in {folder}; train one with ernie5.tokenizers.audio.train"
                )
        return cls(read_codec(folder / CODEC_FILE), read_vocoder(folder / VOCODER_FILE), device=device)

    @torch.inference_mode()
    def encode(
        self,
        audio: bytes | Waveform,
        *,
        modality: str = "speech",
        content_type: str | None = None,
        features: bool = True,
    ) -> TokenSpan:
        """Codes int16 ``[frames, levels]`` of a sound, 12.5 frames a second; silence fills the last one.

        The sound is read and coded piece by piece, so that a long one needs the memory of a short one.

        Args:
            audio: the bytes of a file, or a waveform of any rate.
            modality: ``speech`` or ``sound``.
            content_type: of the bytes, where known.
            features: add the ``codec`` features for understanding, float16 ``[frames, 1, D]``: the latent
                frames before quantisation.

        Raises:
            InvalidMediaError, MediaTooLargeError, UnsupportedMediaError: see
                :func:`~ernie5.tokenizers.audio.preprocessing.audio_blocks`; also NaN or infinite samples.
        """
        if modality not in self.modalities:
            raise UnsupportedMediaError(
                f"the audio tokenizer takes {' and '.join(self.modalities)}, not {modality}"
            )
        if isinstance(audio, Waveform):
            blocks = partial(waveform_blocks, audio, self.limits)
        else:
            blocks = partial(audio_blocks, audio, content_type, self.limits)
        clip = encode_blocks(self, blocks)
        layout = CodebooksLayout(
            codebook_size=self.codec.config.codebook_size,
            levels=self.levels,
            frame_rate=FRAME_RATE,
            sample_rate=float(SAMPLE_RATE),
            samples=clip.samples,
            channels=clip.channels,
        )
        kept = {}
        if features:
            kept[FEATURE_ENCODER] = clip.frames.latent[:, None].astype(np.float16)
        return TokenSpan(modality, layout, clip.frames.codes, self.hash, features=kept)

    @torch.inference_mode()
    def decode(self, span: TokenSpan, levels: int | None = None) -> Waveform:
        """The sound of a span, exactly ``span.layout.samples`` long.

        Args:
            span: of this tokenizer; it may hold fewer than the trained levels.
            levels: use the first ``levels`` levels only.

        Raises:
            TokenizerMismatchError: the span is of another tokenizer.
            InvalidInputError: the span's layout is not this tokenizer's.
        """
        layout = self._checked_layout(span)
        used = layout.levels if levels is None else levels
        if not 1 <= used <= layout.levels:
            raise InvalidInputError(f"levels {used} is outside 1 to {layout.levels}, those of the span")
        if not len(span.codes):
            return Waveform(np.zeros(0, np.float32), SAMPLE_RATE)
        codes = torch.from_numpy(span.codes[:, :used].astype(np.int64)).to(self.device)
        samples = self.vocoder.synthesise(self.codec.decode(codes[None]))[0]
        return Waveform(samples[: layout.samples].clamp(-1.0, 1.0).cpu().numpy(), SAMPLE_RATE)

    def encode_batch(
        self, audios: Sequence[bytes | Waveform], *, modality: str = "speech"
    ) -> list[TokenSpan | ErnieMultiError]:
        """:meth:`encode` of each; a bad one yields its error."""
        return [_or_error(partial(self.encode, audio, modality=modality)) for audio in audios]

    def decode_batch(
        self, spans: Sequence[TokenSpan], levels: int | None = None
    ) -> list[Waveform | ErnieMultiError]:
        """:meth:`decode` of each; a bad one yields its error."""
        return [_or_error(partial(self.decode, span, levels)) for span in spans]

    def encode_segments(
        self, segments: Sequence[Segment], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        """See :class:`~ernie5.tokenizers.base.Tokenizer`; spans of sounds carry no latent of their own."""
        return [_or_error(partial(self._encode_segment, segment, features)) for segment in segments]

    def decode_spans(
        self, spans: Sequence[TokenSpan], *, content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        """WAV files of 16 bits, or ``audio/flac`` or ``audio/ogg`` where asked."""

        def decode(span: TokenSpan) -> Medium:
            return Medium(*write_audio(self.decode(span), content_type))

        return [_or_error(partial(decode, span)) for span in spans]

    def _encode_segment(self, segment: Segment, features: bool) -> TokenSpan:
        if segment.data is None:
            given = "text" if segment.text is not None else f"the unread reference {segment.reference!r}"
            raise InvalidMediaError(
                f"a {segment.modality} segment needs the bytes of an audio file, not {given}"
            )
        return self.encode(
            segment.data, modality=segment.modality, content_type=segment.content_type, features=features
        )

    def _checked_layout(self, span: TokenSpan) -> CodebooksLayout:
        if span.tokenizer != self.hash:
            raise TokenizerMismatchError(
                f"the span is of tokenizer {span.tokenizer}, this one is {self.hash}"
            )
        layout, config = span.layout, self.codec.config
        if not isinstance(layout, CodebooksLayout) or span.modality not in self.modalities:
            raise InvalidInputError(f"a span of {span.modality} is not a sound's")
        if layout.codebook_size != config.codebook_size or layout.levels > config.levels:
            raise InvalidInputError(
                f"{layout.levels} levels of {layout.codebook_size} codes do not fit "
                f"{config.levels} of {config.codebook_size}"
            )
        if (layout.frame_rate, layout.sample_rate) != (FRAME_RATE, SAMPLE_RATE):
            raise InvalidInputError(
                f"{layout.frame_rate} frames and {layout.sample_rate} samples a second do not fit "
                f"{FRAME_RATE} and {SAMPLE_RATE}"
            )
        frames = len(span.codes)
        if layout.samples > frames * FRAME_SAMPLES:
            raise InvalidInputError(
                f"{frames} frames of {FRAME_SAMPLES} samples do not fill {layout.samples} samples"
            )
        if frames > self.limits.seconds * FRAME_RATE + 1:
            raise MediaTooLargeError(f"{frames} frames exceed the limit of {self.limits.seconds:,.0f} s")
        return layout


def _or_error(compute: Callable[[], Result]) -> Result | ErnieMultiError:
    try:
        return compute()
    except ErnieMultiError as error:
        return error


def _hash_of(codec: MelCodec, vocoder: Vocoder, device: torch.device) -> str:
    digest = hashlib.blake2b(digest_size=16)
    header = {"revision": _REVISION, "device": device.type, "dtype": "float32"}
    for name, module in (("codec", codec), ("vocoder", vocoder)):
        digest.update(json.dumps([name, header, module.config.as_json()], sort_keys=True).encode())
        for key, tensor in sorted(module.state_dict().items()):
            if not key.endswith((".counts", ".sums")):
                digest.update(key.encode() + b"\0" + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()
