"""Arithmetic of multi-scale bit codes, for tokenizers and backbone alike.

A picture's latent ``[d, h, w]`` is coded scale by scale (Infinity's multi-scale binary quantiser with fixed
gains): at scale k the residual is averaged down to the scale's grid, each channel's sign is one bit, and
``gain_k * bilinear_up(±1/sqrt(d))`` is taken off the residual. The sum of the scales approximates the latent.
Dividing a cell by its norm first, as the method has it, changes no sign, so nothing here does it.

All functions are parameter-free and batched over any leading dimensions. Codes are integers, one a cell,
bit 0 = channel 0; they are held per scale as ``[..., h_k, w_k]`` int64 or end to end as ``[..., cells]``,
scale by scale, row-major (the order of :class:`~ernie5.protocol.tokens.ScalesLayout`).

Resampling is done tap by tap with element-wise products and sums in a fixed order, never as a matrix product:
the results are then the same to the bit for every batch size and thread count, and equal to the plain numpy
form in :mod:`ernie5.kernels.scales_reference`. A sign that flips because a sum was regrouped would be
another token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

Schedule = Sequence[tuple[int, int]]
Codes = Tensor | np.ndarray | Sequence[Tensor]

GAIN_BASE = 0.8


def gain_of(scale: int) -> float:
    """The fixed gain ``0.8**scale`` of scale number ``scale`` (0 = coarsest), as a float32 value."""
    return float(np.float32(GAIN_BASE**scale))


def cells_of(schedule: Schedule) -> int:
    """Number of cells of all scales together."""
    return sum(height * width for height, width in schedule)


def area_down(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Average ``[..., h, w]`` to ``[..., *grid]``; cell i covers rows ``floor(i h/g) .. ceil((i+1) h/g)``."""
    for axis, size in ((-2, grid[0]), (-1, grid[1])):
        values = _resample(values, axis, size, "area")
    return values


def bilinear_up(values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate ``[..., h, w]`` to ``[..., *grid]`` bilinearly; centres at half positions, edges held."""
    for axis, size in ((-2, grid[0]), (-1, grid[1])):
        values = _resample(values, axis, size, "bilinear")
    return values


def codes_to_values(codes: Tensor | np.ndarray, bits: int) -> Tensor:
    """Codes ``[...]`` (any integer dtype) to float32 ``[..., bits]`` of ±1/sqrt(bits)."""
    integers = _integers(codes)
    shifts = torch.arange(bits, device=integers.device)
    signs = ((integers.unsqueeze(-1) >> shifts) & 1).to(torch.float32) * 2 - 1
    return signs * float(np.float32(1 / math.sqrt(bits)))


def values_to_codes(values: Tensor) -> Tensor:
    """Signs of ``[..., bits]`` to int64 codes ``[...]``; a value at or above zero sets its bit."""
    shifts = torch.arange(values.shape[-1], device=values.device)
    return ((values >= 0).to(torch.int64) << shifts).sum(-1)


def split_codes(codes: Codes, schedule: Schedule) -> list[Tensor]:
    """Codes end to end ``[..., cells]`` to one ``[..., h_k, w_k]`` int64 a scale; a list passes through.

    Raises:
        ValueError: the number of cells or a grid does not fit the schedule.
    """
    if not isinstance(codes, Tensor | np.ndarray):
        parts = [_integers(part) for part in codes]
        for part, grid in zip(parts, schedule):
            if tuple(part.shape[-2:]) != tuple(grid):
                raise ValueError(f"codes of shape {tuple(part.shape)} do not fill scale {tuple(grid)}")
        return parts
    integers = _integers(codes)
    if integers.shape[-1] != cells_of(schedule):
        raise ValueError(
            f"{integers.shape[-1]} codes do not fill the {cells_of(schedule)} cells of {tuple(schedule)}"
        )
    parts = list(integers.split([height * width for height, width in schedule], dim=-1))
    return [part.unflatten(-1, tuple(grid)) for part, grid in zip(parts, schedule)]


def join_codes(codes: Sequence[Tensor]) -> Tensor:
    """Codes per scale ``[..., h_k, w_k]`` end to end, ``[..., cells]``."""
    return torch.cat([part.flatten(-2) for part in codes], dim=-1)


def quantise(latent: Tensor, schedule: Schedule) -> list[Tensor]:
    """Code a latent ``[..., d, h, w]`` into one ``[..., h_k, w_k]`` int64 tensor a scale.

    Raises:
        ValueError: the schedule's last grid is not (h, w), or d is above 32.
    """
    _check_latent(latent, schedule)
    residual = latent.float()
    codes = []
    for scale, grid in enumerate(schedule):
        codes.append(values_to_codes(area_down(residual, grid).movedim(-3, -1)))
        if scale + 1 < len(schedule):
            residual = residual - _contribution(codes[-1], scale, schedule, latent.shape[-3])
    return codes


def accumulate(codes: Codes, schedule: Schedule, bits: int, upto: int | None = None) -> Tensor:
    """Sum of the first ``upto`` scales (all if None) on the final grid: float32 ``[..., bits, h, w]``."""
    parts = split_codes(codes, schedule)
    upto = len(parts) if upto is None else upto
    if not 0 <= upto <= len(parts):
        raise ValueError(f"upto {upto} is outside [0, {len(parts)}]")
    total = torch.zeros(*parts[0].shape[:-2], bits, *schedule[-1], device=parts[0].device)
    for scale in range(upto):
        total = total + _contribution(parts[scale], scale, schedule, bits)
    return total


def block_inputs(codes: Codes, schedule: Schedule, bits: int) -> Tensor:
    """What a next-scale model reads to predict scales 1, 2, …: float32 ``[..., cells - cells_0, bits]``.

    The slot of a cell holds the sum of all *earlier* scales averaged down to that cell's grid, so inputs
    and outputs of a block align cell by cell (VAR, ERNIE 5.0 figure 2). The first scale has no earlier one
    and no slot. The last scale's codes are not read.
    """
    parts = split_codes(codes, schedule)
    total = torch.zeros(*parts[0].shape[:-2], bits, *schedule[-1], device=parts[0].device)
    slots = [total.new_zeros(*parts[0].shape[:-2], 0, bits)]
    for scale in range(len(schedule) - 1):
        total = total + _contribution(parts[scale], scale, schedule, bits)
        slots.append(area_down(total, schedule[scale + 1]).flatten(-2).transpose(-1, -2))
    return torch.cat(slots, dim=-2)


def final_sum(codes: Codes, schedule: Schedule, bits: int) -> Tensor:
    """Mean over cells of the sum of all scales, float32 ``[..., bits]``: the input after the last scale."""
    return area_down(accumulate(codes, schedule, bits), (1, 1)).flatten(-3)


def requantise(latent: Tensor, history: Codes, schedule: Schedule) -> list[Tensor]:
    """Targets that correct a damaged history, one ``[..., h_k, w_k]`` int64 a scale.

    The target of scale k codes what is left of ``latent`` ``[..., d, h, w]`` after the scales below k of
    ``history`` as the model saw them (flipped bits included), so the model learns to mend its own errors
    (Infinity's self-correction). With an undamaged history the result is ``quantise(latent, schedule)``.
    """
    _check_latent(latent, schedule)
    parts = split_codes(history, schedule)
    residual = latent.float()
    targets = []
    for scale, grid in enumerate(schedule):
        targets.append(values_to_codes(area_down(residual, grid).movedim(-3, -1)))
        if scale + 1 < len(schedule):
            residual = residual - _contribution(parts[scale], scale, schedule, latent.shape[-3])
    return targets


def _contribution(codes: Tensor, scale: int, schedule: Schedule, bits: int) -> Tensor:
    values = codes_to_values(codes, bits).movedim(-1, -3)
    return bilinear_up(values, schedule[-1]) * gain_of(scale)


def _check_latent(latent: Tensor, schedule: Schedule) -> None:
    if latent.ndim < 3 or tuple(latent.shape[-2:]) != tuple(schedule[-1]):
        raise ValueError(
            f"latent of shape {tuple(latent.shape)} does not end in the grid {tuple(schedule[-1])}"
        )
    if latent.shape[-3] > 32:
        raise ValueError(f"{latent.shape[-3]} channels do not fit a code of 32 bits")


def _integers(codes: Tensor | np.ndarray) -> Tensor:
    if isinstance(codes, np.ndarray):
        return torch.from_numpy(codes.astype(np.int64))
    return codes.to(torch.int64)


def _resample(values: Tensor, axis: int, size: int, kind: str) -> Tensor:
    source = values.shape[axis]
    if source == size:
        return values
    total: Tensor | None = None
    for index, weight in _taps(source, size, kind, values.device):
        term = values.index_select(axis, index) * (weight if axis == -1 else weight.unsqueeze(-1))
        total = term if total is None else total + term
    assert total is not None
    return total


@lru_cache(maxsize=4096)
def _taps(source: int, size: int, kind: str, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Per tap: which source position each of ``size`` outputs reads (int64) and its weight (float32)."""
    if source < 1 or size < 1:
        raise ValueError(f"can't resample an axis of {source} to {size}")
    outputs = np.arange(size)
    if kind == "area":
        start, end = outputs * source // size, -(-(outputs + 1) * source // size)
        positions = [start + tap for tap in range(int((end - start).max()))]
        weights = [np.where(position < end, 1 / (end - start), 0.0) for position in positions]
    else:
        centre = np.maximum((outputs + 0.5) * source / size - 0.5, 0.0)
        low = np.minimum(np.floor(centre).astype(np.int64), source - 1)
        fraction = (centre - low).astype(np.float32)
        positions, weights = [low, low + 1], [np.float32(1) - fraction, fraction]
    # Cached tensors outlive the call: made under inference mode they would be barred from later backward
    # passes.
    with torch.inference_mode(False):
        return [
            (
                torch.from_numpy(np.minimum(position, source - 1)).to(device),
                torch.from_numpy(weight.astype(np.float32)).to(device),
            )
            for position, weight in zip(positions, weights)
        ]
