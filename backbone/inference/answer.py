"""The state of one answer: what was fed, what comes next, what it may hold.

An answer is a small state machine over the layout of :mod:`ernie5.backbone.layout`: text one id at a time; a
picture as begin marker, grid marker, scale after scale, closing slot, end marker; a sound frame by frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ernie5.backbone.elastic.subnetwork import SubNetwork
from ernie5.backbone.inference.sampler import uniforms
from ernie5.protocol.generation import GenerationParams, Request, TokenEvent, Usage
from ernie5.protocol.grids import GRIDS
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.tokens import ScalesLayout
from ernie5.protocol.vocabulary import UnifiedVocabulary

BARE = ("text", "code")  # told as ids of the text vocabulary, without begin and end markers
Chunk = tuple[str, Tensor, np.ndarray]  # kind ("token", "scale", "frame"), values, positions [n, 3]


@dataclass
class Answer:
    """One running request.

    ``length`` positions lie in the cache; ``clock`` is the next text position of Uni-RoPE; ``chunk`` is what
    the next step feeds. ``open_medium`` names the medium being generated, None while in text.
    """

    request: Request
    subnetwork: SubNetwork
    seed: int
    slot: int
    length: int = 0
    clock: float = 0.0
    chunk: Chunk | None = None
    open_medium: str | None = None
    layout: ScalesLayout | None = None
    codes: list[np.ndarray] = field(default_factory=list)
    origin: float = 0.0
    anything: bool = False  # a medium or text has been produced
    owed: int | None = None  # an end marker that was lost between its medium and a resume
    usage: dict[str, int] = field(default_factory=lambda: {"text": 0, "image": 0, "audio": 0})
    prompt_tokens: int = 0

    @property
    def params(self) -> GenerationParams:
        return self.request.params

    @property
    def media_temperature(self) -> float:
        given = self.params.media_temperature
        return self.params.temperature if given is None else given

    @property
    def produced(self) -> int:
        return sum(self.usage.values())

    def uniforms(self, count: int) -> np.ndarray:
        return uniforms(self.seed, self.length, count)

    def feed_token(self, token: int) -> None:
        """Let the next step read one id at the next text position."""
        self.chunk = ("token", torch.tensor([token]), np.full((1, 3), self.clock, np.float32))
        self.clock += 1

    def tally(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.produced,
            completion_text_tokens=self.usage["text"],
            completion_image_tokens=self.usage["image"],
            completion_audio_tokens=self.usage["audio"],
        )

    def token_event(self, token: int) -> TokenEvent:
        self.usage["text"] += 1
        return TokenEvent(self.request.id, token)


def can_generate(modality: str) -> bool:
    """Whether an answer may hold a modality: bare text, or media whose codes have heads of their own."""
    return modality in BARE or MODALITIES[modality].layout != "sequence"


def allowed_ids(answer: Answer, vocabulary: UnifiedVocabulary) -> Tensor:
    """bool ``[V + markers]``: what the text head may say next.

    Ids of text where text is wanted, ``end_turn`` once something was produced (at once for text), and the
    begin markers of wanted media that the model can generate.
    """
    wanted = answer.params.modalities
    mask = torch.zeros(vocabulary.size, dtype=torch.bool)
    text = any(name in wanted for name in BARE)
    if text:
        mask[: vocabulary.text_size] = True
    if text or answer.anything:
        mask[vocabulary.marker("end_turn")] = True
    for name in wanted:
        if MODALITIES[name].layout != "sequence":
            mask[vocabulary.marker(f"begin_{name}")] = True
    return mask


def grid_ids(vocabulary: UnifiedVocabulary) -> dict[int, tuple[int, int]]:
    """Marker id to final grid."""
    return {vocabulary.marker(f"grid_{h}x{w}"): (h, w) for h, w in GRIDS}
