"""The next-group-of-tokens loss (ERNIE 5.0 report, section 2.1).

Text is a softmax over ids and markers, visual codes are independent bits (Infinity), audio levels are
softmaxes of equal weight. Each modality's mean is divided by the loss of a blind guess (ln of its number of
classes), so that all lie in one interval whatever their head, the report's section 3.2 asks for no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
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
    """How many predictions each modality has: weighted tokens, weighted cells, codes."""
    return {
        "text": float(batch.text_weight.sum()),
        "vision": float(batch.bits_weight.sum()),
        "audio": float(batch.audio_target.numel()),
    }


def loss_sums(outputs: Outputs, batch: RowBatch) -> LossSums:
    """Summed losses of one forward pass; visual cells are means over bits, weighted by scale."""
    text = linear_cross_entropy(outputs.text_hidden, outputs.text_head, batch.text_target, batch.text_weight)
    bits = outputs.bits.shape[-1]
    shifts = torch.arange(bits, device=outputs.bits.device)
    wanted = ((batch.bits_target.to(torch.int64)[:, None] >> shifts) & 1).float()
    vision = F.binary_cross_entropy_with_logits(outputs.bits, wanted, reduction="none").mean(-1)
    vision = (vision * batch.bits_weight).sum()
    audio = text.new_zeros(())
    for level, logits in enumerate(outputs.audio):
        audio = audio + F.cross_entropy(logits, batch.audio_target[:, level], reduction="sum")
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
