"""What leaves the network: text logits, bits of visual codes, audio codes level by level."""

from __future__ import annotations

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

    def logits(self, x_Ad: Tensor, level: int) -> Tensor:
        """float32 ``[A, codebook + 1]``."""
        x = F.rms_norm(x_Ad, x_Ad.shape[-1:], self.norm[level], self.epsilon)
        x = x + F.silu(F.linear(x, self.hidden[level]))
        return F.linear(x, self.out[level])

    def forward(self, x_Td: Tensor, layer: int, codes: AudioCodes) -> Tensor:
        """Run the levels of ``layer`` on the flat hidden states; returns them with embeddings added."""
        levels = self.levels_of_layer.get(layer, ())
        if not levels or not len(codes.at):
            return x_Td
        here = x_Td.index_select(0, codes.at)
        start = here
        for level in levels:
            chosen = codes.choose(level, self.logits(here, level))
            here = here + F.embedding(chosen, self.code[level])
        return x_Td.index_add(0, codes.at, here - start)


class Heads(nn.Module):
    """Text and vision heads; the text head shares its weight with the token embedding."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.bits = nn.Linear(config.width, config.bits)
        self.audio = AudioHeads(config)
