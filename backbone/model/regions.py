"""The dense parts between a model's own operators, which a compiler may fuse.

A layer is norm, projections and rotation; attention; projection, sum and norm; router and experts. Attention
and the experts are operators with kernels of their own, and what lies around the router depends on the data.
The parts between are functions of tensors: rows of positions, whose number alone changes from call to call,
and weights, whose shapes all layers share. So each is compiled once, whatever rows are packed and however
many layers a row's draw keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ernie5.backbone.execution import compiled
from ernie5.backbone.model.attention import attention_inputs, attention_outputs
from ernie5.backbone.model.heads import audio_logits


@dataclass(frozen=True)
class Regions:
    """The dense parts of a model's forward pass, as they are or compiled; the same arguments either way.

    ``real_rotation``: whether rotations are given as pairs of real numbers, which compilers take.
    """

    attention_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]] = attention_inputs
    attention_outputs: Callable[..., tuple[Tensor, Tensor]] = attention_outputs
    audio_logits: Callable[..., Tensor] = audio_logits
    real_rotation: bool = False

    @classmethod
    def compiled(cls, backend: str | Callable[..., Any] = "inductor") -> Regions:
        """Each part by ``torch.compile``."""
        enter = compiled(attention_inputs, (0, 1), backend=backend)
        leave = compiled(attention_outputs, (0, 1), backend=backend)

        def inputs(x_BNd: Tensor, turn: Tensor, *weights: Any) -> tuple[Tensor, Tensor, Tensor]:
            made = enter(x_BNd.flatten(0, 1), turn.flatten(0, 1), *weights)
            query, key, value = (part.unflatten(0, x_BNd.shape[:2]) for part in made)
            return query, key, value

        def outputs(x_BNd: Tensor, mixed: Tensor, *weights: Any) -> tuple[Tensor, Tensor]:
            out, normed = leave(x_BNd.flatten(0, 1), mixed.flatten(0, 1), *weights)
            return out.view_as(x_BNd), normed.view_as(x_BNd)

        return cls(inputs, outputs, compiled(audio_logits, (0,), backend=backend), real_rotation=True)

    def rotation(self, turn: Tensor) -> Tensor:
        """Complex rotations in the form that :attr:`attention_inputs` takes."""
        return torch.view_as_real(turn) if self.real_rotation else turn
