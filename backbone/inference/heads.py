"""What the heads say while an answer is made: audio codes level by level, and what decisions read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.inference.answer import Answer
from ernie5.backbone.inference.sampler import draw_rows
from ernie5.backbone.model.heads import TeacherForcing
from ernie5.backbone.model.transformer import Backbone


class DrawnCodes:
    """Audio codes drawn level by level, each request with its own numbers and temperature."""

    def __init__(
        self,
        config: BackboneConfig,
        answers: Sequence[Answer],
        at: Sequence[int],
        there: Callable[[Tensor], Tensor],
    ) -> None:
        """
        Args:
            at: flat positions of the answers.
            there: brings tensors to the model's device.
        """
        self.at = there(torch.tensor(at, dtype=torch.long))
        levels = config.audio_levels
        self.end = config.audio_codebook
        self.temperature = there(torch.tensor([answer.media_temperature for answer in answers]))
        self.uniform = there(
            torch.from_numpy(
                np.stack([answer.uniforms(levels) for answer in answers])
                if answers
                else np.zeros((0, levels), np.float32)
            )
        )
        self.codes: list[Tensor] = []

    def choose(self, level: int, logits: Tensor) -> Tensor:
        if level:
            # The first level alone decides whether the sound is over.
            logits = logits.clone()
            logits[:, self.end] = -torch.inf
        drawn = draw_rows(logits.float(), self.uniform[:, level], self.temperature)
        if level:
            drawn = torch.where(self.codes[0] == self.end, self.end, drawn)
        self.codes.append(drawn)
        return drawn

    def frames(self) -> Tensor:
        """int64 ``[A, Q]``."""
        return torch.stack(self.codes, 1)


class BothCodes:
    """Two audio passes at disjoint positions of one forward pass."""

    def __init__(self, forced: TeacherForcing, drawn: DrawnCodes) -> None:
        self.forced, self.drawn = forced, drawn
        self.at = torch.cat((forced.at, drawn.at))

    def choose(self, level: int, logits: Tensor) -> Tensor:
        split = len(self.forced.at)
        choices: list[Callable[[int, Tensor], Tensor]] = [self.forced.choose, self.drawn.choose]
        return torch.cat(
            [choose(level, part) for choose, part in zip(choices, (logits[:split], logits[split:]))]
        )


@dataclass
class Said:
    """What the heads say to one answer's next decision, on the host.

    Attributes:
        hidden: ``[n, d]`` of its last chunk.
        frame: int64 ``[Q]``, the audio codes drawn, in the middle of a sound.
        text, bits: computed already, where that saves waiting for a device.
    """

    model: Backbone
    hidden: Tensor
    frame: Tensor | None
    text: Tensor | None = None
    bits: Tensor | None = None

    def text_logits(self) -> Tensor:
        """float32 ``[V + markers]`` after the last position."""
        return self.model.text_logits(self.hidden[-1]) if self.text is None else self.text

    def log_odds(self) -> Tensor:
        """float32 ``[n, bits]``."""
        return self.model.heads.bits(self.hidden).float() if self.bits is None else self.bits
