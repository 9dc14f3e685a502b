"""The next-group-of-tokens loss (ERNIE 5.0 report, section 2.1).

Text is a softmax over ids and markers, visual codes are independent bits (Infinity), audio levels are
softmaxes of equal weight. Each modality's mean is divided by the loss of a blind guess (ln of its number of
classes), so that all lie in one interval whatever their head, the report's section 3.2 asks for no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.execution import compiled
from ernie5.backbone.model.transformer import Outputs
from ernie5.backbone.rows import RowBatch
from ernie5.kernels.cross_entropy import linear_cross_entropy

MODALITIES = ("text", "vision", "audio")


@dataclass(frozen=True)
class LossWeights:
    """Weight of each modality's normalised loss."""

    text: float = 1.0
    vision: float = 1.0
    audio: float = 1.0


@dataclass
class LossSums:
    """Sums of losses in nats and their counts, as tensors; sums of several groups of rows add up."""

    total: dict[str, Tensor]
    count: dict[str, float]


def target_counts(batch: RowBatch) -> dict[str, float]:
    """How many predictions each modality has: weighted tokens, weighted cells, codes.

    Counted once for a batch: ask before it moves to a GPU.
    """
    if batch._counts is None:
        batch._counts = {
            "text": float(batch.text_weight.sum()),
            "vision": float(batch.bits_weight.sum()),
            "audio": float(batch.audio_target.numel()),
        }
    return dict(batch._counts)


def bit_loss(log_odds: Tensor, code: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum over cells of the mean over bits, in nats; ``[c, bits]``, int64 ``[c]`` and ``[c]``."""
    shifts = torch.arange(log_odds.shape[-1], device=log_odds.device)
    wanted = ((code[:, None] >> shifts) & 1).float()
    loss = F.binary_cross_entropy_with_logits(log_odds, wanted, reduction="none").mean(-1)
    return (loss * weight).sum()


def code_loss(logits: Tensor, code: Tensor) -> Tensor:
    """Sum over frames of one level's cross-entropy, in nats; ``[a, classes]`` and int64 ``[a]``."""
    return F.cross_entropy(logits, code, reduction="sum")


@dataclass(frozen=True)
class Losses:
    """The losses of the heads that are no kernel of their own, as they are or compiled."""

    bits: Callable[..., Tensor] = bit_loss
    codes: Callable[..., Tensor] = code_loss

    @classmethod
    def compiled(cls, backend: str | Callable[..., Any] = "inductor") -> Losses:
        """Each by ``torch.compile``."""
        return cls(
            compiled(bit_loss, (0, 1, 2), backend=backend), compiled(code_loss, (0, 1), backend=backend)
        )


_PLAIN = Losses()


def loss_sums(outputs: Outputs, batch: RowBatch, losses: Losses = _PLAIN) -> LossSums:
    """Summed losses of one forward pass; visual cells are means over bits, weighted by scale."""
    text = linear_cross_entropy(outputs.text_hidden, outputs.text_head, batch.text_target, batch.text_weight)
    vision = losses.bits(outputs.bits, batch.bits_target.to(torch.int64), batch.bits_weight)
    audio = text.new_zeros(())
    for level, logits in enumerate(outputs.audio):
        audio = audio + losses.codes(logits, batch.audio_target[:, level])
    return LossSums({"text": text, "vision": vision, "audio": audio}, target_counts(batch))


def weighted_loss(
    sums: LossSums, counts: dict[str, float], config: BackboneConfig, weights: LossWeights
) -> Tensor:
    """The step's share of this group: sums over the counts of the whole step, balanced and weighted."""
    blind = {
        "text": math.log(config.text_vocabulary),
        "vision": math.log(2),
        "audio": math.log(config.audio_codebook + 1),
    }
    loss = next(iter(sums.total.values())).new_zeros(())
    for name in MODALITIES:
        if counts[name]:
            loss = loss + getattr(weights, name) * sums.total[name] / (counts[name] * blind[name])
    return loss
