"""What leaves the network: text logits, bits of visual codes, audio codes level by level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig


class AudioCodes(Protocol):
    """Says which codes an audio pass continues with: the true ones in training, drawn ones in answering."""

    at: Tensor  # flat positions [A]

    def choose(self, level: int, logits: Tensor) -> Tensor:
        """Codes ``[A]`` of ``level`` given logits ``[A, codebook + 1]``; the last class means "end"."""
        ...


class TeacherForcing:
    """The true codes; keeps all logits for the loss."""

    def __init__(self, at: Tensor, target: Tensor) -> None:
        self.at, self.target = at, target
        self.logits: list[Tensor] = []

    def choose(self, level: int, logits: Tensor) -> Tensor:
        self.logits.append(logits)
        return self.target[:, level]


def audio_logits(x_Ad: Tensor, norm_d: Tensor, hidden: Tensor, out: Tensor, epsilon: float) -> Tensor:
    """float32 ``[A, codebook + 1]`` of one level; ``hidden`` is ``[d, d]``, ``out`` ``[codebook + 1, d]``."""
    x = F.rms_norm(x_Ad, x_Ad.shape[-1:], norm_d, epsilon)
    x = x + F.silu(F.linear(x, hidden))
    return F.linear(x, out)


class AudioHeads(nn.Module):
    """Depth-wise heads on the top layers (ERNIE 5.0 report, section 2.3.2).

    After its layer, level q is predicted from the hidden state, and the embedding of its code is added to the
    hidden state, on which the next level, or the next layer, goes on.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        levels, classes, width = config.audio_levels, config.audio_codebook + 1, config.width
        self.levels_of_layer = config.levels_of_layer
        self.epsilon = config.norm_epsilon
        self.norm = nn.Parameter(torch.ones(levels, width))
        self.hidden = nn.Parameter(torch.empty(levels, width, width))
        self.out = nn.Parameter(torch.empty(levels, classes, width))
        self.code = nn.Parameter(torch.empty(levels, classes, width))

    def forward(
        self, x_Td: Tensor, layer: int, codes: AudioCodes, logits: Callable[..., Tensor] = audio_logits
    ) -> Tensor:
        """Run the levels of ``layer`` on the flat hidden states; returns them with embeddings added.

        ``logits`` is :func:`audio_logits` or its compiled form.
        """
        levels = self.levels_of_layer.get(layer, ())
        if not levels or not len(codes.at):
            return x_Td
        here = x_Td.index_select(0, codes.at)
        start = here
        for level in levels:
            weights = (self.norm[level], self.hidden[level], self.out[level])
            chosen = codes.choose(level, logits(here, *weights, self.epsilon))
            here = here + F.embedding(chosen, self.code[level])
        return x_Td.index_add(0, codes.at, here - start)


class Heads(nn.Module):
    """Text and vision heads; the text head shares its weight with the token embedding."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.bits = nn.Linear(config.width, config.bits)
        self.audio = AudioHeads(config)
