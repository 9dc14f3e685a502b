"""Random samples of every kind for the backbone's tests."""

from __future__ import annotations

import numpy as np

from ernie5.backbone.config import preset
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.samples import Role
from ernie5.protocol.tokens import (
    CodebooksLayout,
    ScalesLayout,
    SequenceLayout,
    TokenSegment,
    TokenSequence,
    TokenSpan,
)
from ernie5.protocol.vocabulary import UnifiedVocabulary

NANO = preset("nano").model_copy(
    update={"text_vocabulary": 50, "audio_levels": 3, "audio_codebook": 16, "bits": 6}
)
VOCABULARY = UnifiedVocabulary(NANO.text_vocabulary)


def text(rng: np.random.Generator, role: Role, length: int = 4) -> TokenSegment:
    codes = rng.integers(0, NANO.text_vocabulary, length).astype(np.int32)
    return TokenSegment(TokenSpan("text", SequenceLayout(NANO.text_vocabulary), codes, "t"), role)


def picture(rng: np.random.Generator, role: Role, grid: tuple[int, int] = (4, 4)) -> TokenSegment:
    layout = ScalesLayout(NANO.bits, schedule_for(grid))
    codes = rng.integers(0, 1 << NANO.bits, layout.cells_per_frame).astype(np.uint32)
    features = rng.standard_normal((grid[0] * grid[1] // 4, 4, 96)).astype(np.float16)
    return TokenSegment(TokenSpan("image", layout, codes, "v", features={"cnn": features}), role)


def sound(rng: np.random.Generator, role: Role, frames: int = 5, levels: int = 3) -> TokenSegment:
    layout = CodebooksLayout(NANO.audio_codebook, levels, 12.5, 16000, frames * 1280)
    codes = rng.integers(0, NANO.audio_codebook, (frames, levels)).astype(np.int16)
    features = {"codec": rng.standard_normal((frames, 1, 48)).astype(np.float16)}
    return TokenSegment(TokenSpan("speech", layout, codes, "a", features=features), role)


def sequence(*segments: TokenSegment, name: str = "sample") -> TokenSequence:
    return TokenSequence(name, segments)


def mixed(rng: np.random.Generator, kind: int) -> TokenSequence:
    """One of five kinds of sample: read, draw, hear, say, write."""
    segments = [
        (picture(rng, "context"), text(rng, "context"), text(rng, "target", 2)),
        (text(rng, "context"), picture(rng, "target")),
        (sound(rng, "context"), text(rng, "context"), text(rng, "target", 2)),
        (text(rng, "context"), sound(rng, "target")),
        (text(rng, "target", 9),),
    ][kind % 5]
    return sequence(*segments, name=str(kind))
