"""How hard each position is: the rank of its loss, and the guess that each layer makes of it beforehand.

A layer that gives hard tokens more experts must guess the difficulty before the heads have spoken. Its guess
is a linear function of the token's representation, fitted to how the token's loss then ranks in its
modality. No gradient of the fit reaches the representation, so it changes nothing but the guess.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.model.router import Routing
from ernie5.backbone.model.transformer import Outputs
from ernie5.backbone.rows import RowBatch

# Adam undoes the factor; it keeps these gradients out of the norm that is clipped.
_WEIGHT = 0.01


@torch.no_grad()
def position_losses(outputs: Outputs, batch: RowBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """By modality: int64 ``[n]`` flat positions that predict, and float32 ``[n]`` their losses in nats, the
    mean over the bits of a cell or the levels of a frame. Modalities without predictions are left out; no
    gradient flows back."""
    # Not outputs.text: made here it would be kept without its gradient.
    text = F.linear(outputs.text_hidden, outputs.text_head.to(outputs.text_hidden.dtype)).float()
    shifts = torch.arange(outputs.bits.shape[-1], device=outputs.bits.device)
    bits = ((batch.bits_target.to(torch.int64)[:, None] >> shifts) & 1).float()
    found = {
        "text": (batch.text_at, F.cross_entropy(text, batch.text_target, reduction="none")),
        "vision": (
            batch.bits_at,
            F.binary_cross_entropy_with_logits(outputs.bits, bits, reduction="none").mean(-1),
        ),
    }
    if outputs.audio:
        levels = [
            F.cross_entropy(logits, batch.audio_target[:, level], reduction="none")
            for level, logits in enumerate(outputs.audio)
        ]
        found["audio"] = (batch.audio_at, torch.stack(levels).mean(0))
    return {name: (at, loss) for name, (at, loss) in found.items() if len(at)}


def difficulty(losses: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """All predicting positions, and for each the share of its modality's predictions that are no harder.

    Ranks, because nats of a token, a bit and a code don't compare, and a few great losses would be all
    that a fit to them sees.
    """
    at, ranks = [], []
    for positions, loss in losses.values():
        at.append(positions)
        ranks.append((loss.argsort(stable=True).argsort() + 0.5) / len(loss))
    return torch.cat(at), torch.cat(ranks)


def estimate_losses(outputs: Outputs, batch: RowBatch, routing: Routing) -> list[Tensor]:
    """For each layer that guessed, the mean squared error of its guesses against :func:`difficulty`."""
    losses = position_losses(outputs, batch) if routing.estimates else {}
    if not losses:
        return []
    at, wanted = difficulty(losses)
    return [
        _WEIGHT * F.mse_loss(estimate.index_select(0, at), wanted) for estimate in routing.estimates.values()
    ]
