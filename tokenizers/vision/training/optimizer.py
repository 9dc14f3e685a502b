"""Muon for convolutions: momentum whose singular values are all brought to about one (Jordan 2024).

The Newton-Schulz iteration runs on the small Gram matrix, so a step costs two products of the full matrix
instead of ten: all its factors are polynomials of the Gram matrix and commute. And how learning rates fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Quintic coefficients of Jordan's iteration: fast at small singular values, ends within about [0.7, 1.2].
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of ``[n, rows, columns]`` (rows <= columns) near one, directions kept."""
    matrices = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    gram = matrices @ matrices.mT
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    product = identity.expand_as(gram)
    for _ in range(_ITERATIONS):
        factor = _A * identity + _B * gram + _C * (gram @ gram)
        product = factor @ product
        gram = factor @ gram @ factor
    return product @ matrices


class Muon(torch.optim.Optimizer):
    """Muon over weights of two or more dimensions, flattened to ``[outputs, inputs]``.

    An update has the root mean square ``0.2 * lr`` of a typical AdamW update, so AdamW's learning rates
    carry over.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"]).flatten(1)
                by_shape.setdefault(tuple(update.shape), []).append((parameter, update))
            for (rows, columns), entries in by_shape.items():
                stacked = torch.stack([update for _, update in entries])
                stacked = orthogonalise(stacked) if rows <= columns else orthogonalise(stacked.mT).mT
                scale = 0.2 * max(rows, columns) ** 0.5 * group["lr"]
                for (parameter, _), update in zip(entries, stacked):
                    parameter.sub_(update.reshape(parameter.shape), alpha=scale)


def follow_cosine(
    optimizers: Iterable[torch.optim.Optimizer], step: int, progress: float, *, warm_up: int, least: float
) -> None:
    """Set learning rates for ``step`` at ``progress`` in [0, 1] of a run.

    Half a cosine from each optimiser's own rate down to its share ``least``, after ``warm_up`` rising steps.
    """
    factor = min(1.0, (step + 1) / warm_up) * (0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))) + least
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor
