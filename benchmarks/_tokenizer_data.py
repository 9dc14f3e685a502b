"""Held-out media for the tokenizers' benchmark, and what older codecs make of the pictures.

Built corpora are taken where they are (``ERNIE_MULTI_DATA``), else the corpus that ships; only their test
splits are read.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ernie5.corpora.corpus import corpus_names, open_corpus
from ernie5.protocol.samples import Segment
from ernie5.tokenizers.audio.clips import DIGITS
from ernie5.tokenizers.modalities import BUILT_IN

SIDE = 64
_JPEG = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 65, 80)
_WEBP = (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 75)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Segments of a test split, what is known of each, and where they come from."""

    source: str
    segments: list[Segment]
    labels: list[Any]


def _spread(count: int, most: int) -> np.ndarray:
    """Up to ``most`` numbers in [0, count), evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))


def _first(names: tuple[str, ...]) -> str:
    """The first of the corpora that is built; ``mini`` always is."""
    return next(name for name in (*names, "mini") if name in corpus_names())


def pictures(most: int) -> HeldOut:
    """Drawings of held-out concepts as PNG files of 64 x 64 pixels over white; labels: uint8 [64, 64, 3]."""
    corpus = open_corpus(name := _first(("emoji",)), "test", tasks=("emoji_draw",))
    segments, labels = [], []
    for index in _spread(len(corpus), most):
        data = corpus[int(index)].segments[-1].data
        assert data is not None
        with Image.open(io.BytesIO(data)) as picture:
            rgba = picture.convert("RGBA")
        over = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
        if over.size != (SIDE, SIDE):
            over = over.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        over.save(buffer, "PNG")
        segments.append(Segment(modality="image", data=buffer.getvalue(), content_type="image/png"))
        labels.append(np.asarray(over))
    return HeldOut(f"{name}, {len(segments)} held-out drawings", segments, labels)


def spoken_digits(most: int) -> HeldOut:
    """Clips of held-out voices that say a digit; labels: its value."""
    name = "digits" if "digits" in corpus_names() else "mini"
    corpus = open_corpus(name, "test", tasks=("speech_say",))
    values = {
        (language, word): value for language, words in DIGITS.items() for value, word in enumerate(words)
    }
    found = []
    for index in range(len(corpus)):
        sample = corpus[index]
        value = values.get((sample.metadata.get("language"), sample.metadata.get("label")))
        if value is not None:
            found.append((sample.segments[-1], value))
    chosen = [found[index] for index in _spread(len(found), most)]
    segments = [segment for segment, _ in chosen]
    return HeldOut(f"{name}, {len(segments)} spoken digits", segments, [value for _, value in chosen])


def texts(most: int) -> HeldOut:
    """Held-out texts of the shipped corpus, code left out."""
    corpus = open_corpus("mini", "test", tasks=("text",))
    found = [corpus[index].segments[-1] for index in range(len(corpus))]
    prose = [segment for segment in found if segment.modality == "text"]
    segments = [prose[index] for index in _spread(len(prose), most)]
    return HeldOut(f"mini, {len(segments)} held-out texts", segments, [])


def sample_segment(name: str) -> Segment:
    """The sample file of a modality as a segment."""
    sample = BUILT_IN[name].sample
    data = sample.path.read_bytes()
    if BUILT_IN[name].modality.service == "text":
        return Segment(modality=name, text=data.decode(), content_type=sample.content_type)
    return Segment(modality=name, data=data, content_type=sample.content_type)


def psnr(left: np.ndarray, right: np.ndarray) -> float:
    """Peak signal-to-noise ratio of uint8 pictures in dB; 100 where they are equal."""
    error = float(((left.astype(np.float64) - right) ** 2).mean()) / 255**2
    return float(-10 * np.log10(error + 1e-10))


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean bits per pixel and mean PSNR of a codec by quality, rising; with and without header bytes.

    ``header`` is what a picture without content takes: the bytes of an all-white one at the same quality.
    """

    bpp: list[float]
    payload_bpp: list[float]
    psnr: list[float]
    header: float

    def at(self, rate: float, *, payload: bool) -> float | None:
        """PSNR at a rate, interpolated; None outside the rates that the codec reaches."""
        rates = self.payload_bpp if payload else self.bpp
        if not rates[0] <= rate <= rates[-1]:
            return None
        return float(np.interp(rate, rates, self.psnr))


def curve(kind: str, originals: list[np.ndarray]) -> Curve:
    """The curve of ``JPEG`` (optimised tables) or ``WEBP`` (method 6) on pictures of one size."""
    white = np.full_like(originals[0], 255)
    pixels = originals[0].shape[0] * originals[0].shape[1]
    points = []
    for quality in _JPEG if kind == "JPEG" else _WEBP:
        made = [_recode(original, kind, quality) for original in originals]
        header = len(_recode(white, kind, quality)[0])
        size = float(np.mean([len(data) for data, _ in made]))
        quality_db = float(np.mean([psnr(left, right) for left, (_, right) in zip(originals, made)]))
        points.append((8 * size / pixels, 8 * (size - header) / pixels, quality_db, header))
    points.sort()
    bpp, payload, decibels, headers = (list(column) for column in zip(*points))
    return Curve(bpp, payload, decibels, float(np.mean(headers)))


def _recode(pixels: np.ndarray, kind: str, quality: int) -> tuple[bytes, np.ndarray]:
    buffer = io.BytesIO()
    options: dict[str, Any] = {"optimize": True} if kind == "JPEG" else {"method": 6}
    Image.fromarray(pixels).save(buffer, kind, quality=quality, **options)
    with Image.open(io.BytesIO(buffer.getvalue())) as picture:
        return buffer.getvalue(), np.asarray(picture.convert("RGB"))
