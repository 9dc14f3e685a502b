"""The media that the text, vision and audio tokenizers take by themselves, with their samples and figures.

The services hand these media to the tokenizers directly; here they are wrapped so that the registry covers
every modality. A value is the text, or the bytes of a file.
"""

from __future__ import annotations

import io
import math
from typing import Any, ClassVar

import numpy as np

from ernie5.protocol.errors import ErnieMultiError, InvalidMediaError, UnsupportedMediaError
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSpan
from ernie5.tokenizers.modalities.codec import SAMPLES, Codec, Figure, SampleFile, TextCodec, utf8


class PlainTextCodec(TextCodec[str]):
    """Any Unicode string, exact."""

    modality = MODALITIES["text"]
    wraps_base = True
    content_types: ClassVar[tuple[str, ...]] = ("text/plain", "text/markdown")
    promise = "every character exact"
    sample = SampleFile(
        SAMPLES / "text.txt",
        "text/plain",
        "Genesis 1:1-3 (King James Version) and Li Bai's “Quiet Night Thought”",
        "public domain",
    )

    def read(self, data: bytes, content_type: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return utf8(data, self.modality.name)  # raises with the place

    def write(self, value: str, content_type: str) -> bytes:
        return value.encode()

    def to_text(self, value: str) -> str:
        return value

    def from_text(self, text: str) -> str:
        return text

    def compare(self, original: str, decoded: str) -> Figure:
        wrong = sum(left != right for left, right in zip(original, decoded)) + abs(
            len(original) - len(decoded)
        )
        return Figure("characters that differ", wrong, "", 0)


class CodeCodec(PlainTextCodec):
    """Source code, exact."""

    modality = MODALITIES["code"]
    content_types = ("text/x-python", "text/x-c", "text/x-c++", "text/x-java", "text/javascript")
    sample = SampleFile(
        SAMPLES / "code.py.txt", "text/x-python", "tokenizers/base.py of this package", "Apache-2.0"
    )


class _FileCodec(Codec[bytes]):
    """Files that the base reads and writes itself."""

    wraps_base = True

    def read(self, data: bytes, content_type: str) -> bytes:
        return data

    def write(self, value: bytes, content_type: str) -> bytes:
        return value

    def encode(self, value: bytes, base: Any, *, features: bool = False) -> TokenSpan:
        segment = Segment(modality=self.modality.name, data=value)
        (span,) = base.encode_segments([segment], features=features)
        if isinstance(span, ErnieMultiError):
            raise span
        return span

    def decode(self, span: TokenSpan, base: Any) -> bytes:
        self.check_span(span, base)
        (medium,) = base.decode_spans([span])
        if isinstance(medium, ErnieMultiError):
            raise medium
        return medium.data


class ImageCodec(_FileCodec):
    """Pictures through the vision tokenizer."""

    modality = MODALITIES["image"]
    content_types = ("image/png", "image/jpeg", "image/webp")
    promise = "a likeness: about 24 dB on drawings of 64x64 pixels"
    sample = SampleFile(
        SAMPLES / "image.png",
        "image/png",
        "sheaf of rice of Twemoji, npm emoji-datasource-twitter 16.0.0; a concept not trained on",
        "CC-BY-4.0",
    )

    def compare(self, original: bytes, decoded: bytes) -> Figure:
        return _psnr(frames_of(original)[:1], frames_of(decoded)[:1])


class VideoCodec(_FileCodec):
    """Clips through the vision tokenizer, at most 64 frames, 12.5 a second or fewer of a longer one."""

    modality = MODALITIES["video"]
    content_types = ("image/webp", "image/gif", "video/mp4", "video/webm")
    promise = "a likeness of up to 64 frames, 12.5 a second at most, and the length"
    sample = SampleFile(
        SAMPLES / "video.webp",
        "image/webp",
        "the drawing of image.png turning, made for this package",
        "CC-BY-4.0",
    )

    def encode(self, value: bytes, base: Any, *, features: bool = False) -> TokenSpan:
        if "video" not in base.modalities:
            raise UnsupportedMediaError("this vision tokenizer has no weights for video", param="modality")
        return super().encode(value, base, features=features)

    def compare(self, original: bytes, decoded: bytes) -> Figure:
        before, after = frames_of(original), frames_of(decoded)
        # Where frames were left out, each one kept is compared with that of its moment.
        step = len(before) / max(1, len(after))
        return _psnr([before[int((place + 0.5) * step)] for place in range(len(after))], after)


class SpeechCodec(_FileCodec):
    """Speech through the audio tokenizer."""

    modality = MODALITIES["speech"]
    content_types = ("audio/wav", "audio/flac", "audio/ogg")
    promise = "a likeness, 800 bit/s"
    sample = SampleFile(
        SAMPLES / "speech.ogg",
        "audio/ogg",
        "“sept”, spoken by Armelle Desjardins, a voice not trained on: Debian asterisk-prompt-fr-armelle "
        "20070613-2.2",
        "BSD-style",
    )

    def compare(self, original: bytes, decoded: bytes) -> Figure:
        return _log_mel_difference(original, decoded)


class SoundCodec(SpeechCodec):
    """Music and sounds through the audio tokenizer."""

    modality = MODALITIES["sound"]
    sample = SampleFile(
        SAMPLES / "sound.ogg",
        "audio/ogg",
        "chimes (complete.oga) by Richard Boulanger et al., resampled: Debian sound-theme-freedesktop 0.8-2",
        "CC-BY-3.0",
    )


def frames_of(data: bytes) -> list[np.ndarray]:
    """The frames of a picture or clip over white, uint8 ``[H, W, 3]`` each."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as picture:
            frames = []
            for index in range(getattr(picture, "n_frames", 1)):
                picture.seek(index)
                over = Image.new("RGBA", picture.size, "white")
                over.alpha_composite(picture.convert("RGBA"))
                frames.append(np.asarray(over.convert("RGB")))
            return frames
    except UnidentifiedImageError:
        import av

        try:
            with av.open(io.BytesIO(data), mode="r") as clip:
                return [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
        except av.FFmpegError as error:
            raise InvalidMediaError(f"no picture or clip: {error}") from None


def _psnr(originals: list[np.ndarray], decoded: list[np.ndarray]) -> Figure:
    """Peak signal to noise over all pixels of the frames that both have, in dB."""
    name, limit = "PSNR", 18.0
    pairs = list(zip(originals, decoded))
    if any(left.shape != right.shape for left, right in pairs):
        return Figure(name, -math.inf, "dB", limit, higher=True)
    error = np.mean([np.mean((left.astype(np.float64) - right) ** 2) for left, right in pairs])
    value = 10 * math.log10(255**2 / error) if error > 0 else math.inf
    return Figure(name, value, "dB", limit, higher=True)


def _log_mel_difference(original: bytes, decoded: bytes) -> Figure:
    """Mean absolute difference of natural log-mel bands, as the codec sees them."""
    import torch

    from ernie5.tokenizers.audio.mel import HOP, log_mel
    from ernie5.tokenizers.audio.preprocessing import read_audio

    left, right = (read_audio(data, None).samples for data in (original, decoded))
    length = min(len(left), len(right)) // HOP * HOP
    bands = [log_mel(torch.from_numpy(samples[:length].copy())) for samples in (left, right)]
    return Figure("log-mel L1", float((bands[0] - bands[1]).abs().mean()), "", 0.8)
