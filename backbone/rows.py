"""Rows: laid-out samples packed side by side, as tensors, with the mask that keeps them apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.execution import moved
from ernie5.backbone.layout import FEATURE, FRAME, NO_TARGET, SCALE, TOKEN, SampleLayout
from ernie5.kernels.flashmask import MaskPlan


@dataclass
class RowBatch:
    """Packed rows of B x N positions. ``*_at`` are flat indices into B * N.

    ``sample`` int64 ``[B, N]`` numbers the samples of the batch; padding is a document of its own and
    numbered like one. ``positions`` float32 ``[B, N, 3]``; ``intervals`` int32 ``[B, 1, N, 3, 2]``.
    """

    token: Tensor
    token_at: Tensor
    features: dict[str, Tensor]
    feature_at: Tensor
    scale_values: Tensor
    scale_index: Tensor
    scale_at: Tensor
    frames: Tensor
    frame_features: Tensor
    frame_at: Tensor
    positions: Tensor
    intervals: Tensor
    sample: Tensor
    text_at: Tensor
    text_target: Tensor
    text_weight: Tensor
    bits_at: Tensor
    bits_target: Tensor
    bits_weight: Tensor
    audio_at: Tensor
    audio_target: Tensor
    lengths: list[list[int]]
    group: Tensor  # int8 [B, N]: what kind of position, for routing tables: see GROUPS
    _plan: MaskPlan | None = field(default=None, repr=False)
    # Kept by target_counts: on a GPU each would have to be waited for.
    _counts: dict[str, float] | None = field(default=None, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.positions.shape[0], self.positions.shape[1]

    @property
    def samples(self) -> int:
        return int(self.sample.max()) + 1

    def real(self) -> Tensor:
        """bool ``[B * N]``: False for padding."""
        held = torch.tensor([sum(lengths) for lengths in self.lengths])
        return (torch.arange(self.shape[1]) < held[:, None]).flatten()

    def plan(self) -> MaskPlan:
        """The rows' mask, prepared once: it has to live until the backward pass."""
        if self._plan is None:
            self._plan = MaskPlan.from_intervals(self.intervals, self.positions.shape[1])
        return self._plan

    def to(self, device: torch.device, *, non_blocking: bool = False) -> RowBatch:
        """The same rows on ``device``, the mask's plan included; the batch itself if it lies there.

        The mask is checked where it lies now, so that nothing is waited for on a GPU. ``non_blocking`` takes
        pinned memory and returns before the copies are done; work on the current stream comes after them.
        """
        if self.positions.device == device:
            return self

        def there(tensor: Tensor) -> Tensor:
            return moved(tensor, device, non_blocking=non_blocking)

        tensors: dict[str, Any] = {
            item.name: value for item in fields(self) if isinstance(value := getattr(self, item.name), Tensor)
        }
        # Other devices know few operations on unsigned numbers.
        tensors["bits_target"] = self.bits_target.to(torch.int64)
        tensors = {name: there(value) for name, value in tensors.items()}
        # A plan made in inference mode would be of no use to training.
        with torch.inference_mode(False):
            checked = self.plan()
            plan = MaskPlan(there(checked.intervals), checked.rows)
        features = {name: there(values) for name, values in self.features.items()}
        there_too = replace(self, **tensors, features=features, _plan=plan)
        there_too._counts = self._counts
        return there_too


GROUPS = ("text", "image understanding", "image generation", "audio")
_JOINED = (
    "scale_values",
    "scale_index",
    "frames",
    "frame_features",
    "bits_at",
    "bits_target",
    "bits_weight",
    "audio_at",
    "audio_target",
)


def pack(rows: Iterable[Sequence[SampleLayout]], length: int, config: BackboneConfig) -> RowBatch:
    """Join samples into rows of ``length`` positions; what remains of a row is padding.

    Raises:
        ValueError: a row's samples exceed ``length``.
    """
    rows = [list(row) for row in rows]
    count = len(rows)
    token = np.zeros((count, length), np.int64)
    kind = np.zeros((count, length), np.int8)
    position = np.zeros((count, length, 3), np.float32)
    intervals = np.zeros((count, 1, length, 3, 2), np.int32)
    sample = np.zeros((count, length), np.int64)
    text_target = np.full((count, length), NO_TARGET, np.int64)
    text_weight = np.zeros((count, length), np.float32)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in _JOINED}
    features: dict[str, list[np.ndarray]] = {name: [] for name in config.features}
    number = 0
    for index, row in enumerate(rows):
        offset = 0
        for item in row:
            end = offset + len(item)
            if end > length:
                raise ValueError(f"samples of {end} positions do not fit a row of {length}")
            here = slice(offset, end)
            token[index, here], kind[index, here] = item.token, item.kind
            position[index, here], sample[index, here] = item.position, number
            text_target[index, here] = item.text_target
            text_weight[index, here] = item.text_weight
            bounds = intervals[index, 0, here]
            bounds[:, 0, 1] = item.first_visible + offset
            bounds[:, 1] = item.hidden + offset * (item.hidden[:, 1:] > 0)
            bounds[:, 2, 0], bounds[:, 2, 1] = end, length
            base = index * length + offset
            for name in features:
                if name in item.features:
                    features[name].append(item.features[name])
            for name in parts:
                values = getattr(item, name)
                if len(values):
                    parts[name].append(values + base if name.endswith("_at") else values)
            offset, number = end, number + 1
        if offset < length:
            sample[index, offset:] = number
            bounds = intervals[index, 0, offset:]
            bounds[:, 0, 1] = np.arange(offset, length)
            bounds[:, 2] = length
            number += 1
    flat_kind = torch.from_numpy(kind.reshape(-1))

    def joined(name: str, empty: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate(parts[name]) if parts[name] else empty)

    nothing = np.zeros(0, np.int64)
    flat_target = torch.from_numpy(text_target.reshape(-1))
    text_at = (flat_target != NO_TARGET).nonzero().squeeze(1)
    token_at = (flat_kind == TOKEN).nonzero().squeeze(1)
    return RowBatch(
        token=torch.from_numpy(token.reshape(-1))[token_at],
        token_at=token_at,
        features={
            name: torch.from_numpy(np.concatenate(values).astype(np.float32))
            for name, values in features.items()
            if values
        },
        feature_at=(flat_kind == FEATURE).nonzero().squeeze(1),
        scale_values=joined("scale_values", np.zeros((0, config.bits), np.float32)),
        scale_index=joined("scale_index", nothing),
        scale_at=(flat_kind == SCALE).nonzero().squeeze(1),
        frames=joined("frames", np.zeros((0, config.audio_levels), np.int64)),
        frame_features=joined(
            "frame_features", np.zeros((0, sum(config.sound_features.values())), np.float16)
        ).float(),
        frame_at=(flat_kind == FRAME).nonzero().squeeze(1),
        positions=torch.from_numpy(position),
        intervals=torch.from_numpy(intervals),
        sample=torch.from_numpy(sample),
        text_at=text_at,
        text_target=flat_target[text_at],
        text_weight=torch.from_numpy(text_weight.reshape(-1))[text_at],
        bits_at=joined("bits_at", nothing),
        bits_target=joined("bits_target", np.zeros(0, np.uint32)),
        bits_weight=joined("bits_weight", np.zeros(0, np.float32)),
        audio_at=joined("audio_at", nothing),
        audio_target=joined("audio_target", np.zeros((0, config.audio_levels), np.int64)),
        lengths=[[len(item) for item in row] for row in rows],
        group=flat_kind.view(count, length),
    )
