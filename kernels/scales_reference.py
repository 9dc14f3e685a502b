"""Plain numpy form of :mod:`ernie5.kernels.scales`: loops over cells, one picture at a time, no caching.

Tests compare the two on random inputs, codes to the bit. Products and sums are float32 in the same
documented order: rows first, then columns, taps by rising position, each product rounded before it is
added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Schedule = Sequence[tuple[int, int]]
Array = npt.NDArray[Any]


def area_down(values: Array, grid: tuple[int, int]) -> Array:
    """Average float32 ``[d, h, w]`` down to ``[d, *grid]``."""
    return _area_rows(_area_rows(values, grid[0]).swapaxes(1, 2), grid[1]).swapaxes(1, 2)


def bilinear_up(values: Array, grid: tuple[int, int]) -> Array:
    """Interpolate float32 ``[d, h, w]`` to ``[d, *grid]``."""
    return _bilinear_rows(_bilinear_rows(values, grid[0]).swapaxes(1, 2), grid[1]).swapaxes(1, 2)


def codes_to_values(codes: Array, bits: int) -> Array:
    """Codes ``[h, w]`` to float32 ``[bits, h, w]`` of ±1/sqrt(bits)."""
    level = np.float32(1 / math.sqrt(bits))
    planes = [np.where(codes.astype(np.int64) >> bit & 1, level, -level) for bit in range(bits)]
    return np.stack(planes).astype(np.float32)


def quantise(latent: Array, schedule: Schedule) -> list[Array]:
    """Code float32 ``[d, h, w]`` into one int64 ``[h_k, w_k]`` a scale."""
    return requantise(latent, None, schedule)


def requantise(latent: Array, history: list[Array] | None, schedule: Schedule) -> list[Array]:
    """Code ``latent`` against the scales of ``history`` (against its own codes if None)."""
    bits = len(latent)
    residual = latent.astype(np.float32)
    targets = []
    for scale, grid in enumerate(schedule):
        small = area_down(residual, grid)
        targets.append(sum((small[bit] >= 0).astype(np.int64) << bit for bit in range(bits)))
        seen = targets[-1] if history is None else history[scale]
        residual = residual - _contribution(seen, scale, schedule, bits)
    return targets


def accumulate(codes: list[Array], schedule: Schedule, bits: int, upto: int) -> Array:
    """Sum of the first ``upto`` scales on the final grid, float32 ``[bits, h, w]``."""
    total: Array = np.zeros((bits, *schedule[-1]), np.float32)
    for scale in range(upto):
        total = total + _contribution(codes[scale], scale, schedule, bits)
    return total


def block_inputs(codes: list[Array], schedule: Schedule, bits: int) -> Array:
    """The accumulated earlier scales for each cell of scales 1, 2, …: float32 ``[cells - cells_0, bits]``."""
    blocks = [np.zeros((0, bits), np.float32)]
    for scale in range(1, len(schedule)):
        blocks.append(
            area_down(accumulate(codes, schedule, bits, scale), schedule[scale]).reshape(bits, -1).T
        )
    return np.concatenate(blocks)


def final_sum(codes: list[Array], schedule: Schedule, bits: int) -> Array:
    """Mean over the cells of the sum of all scales, float32 ``[bits]``."""
    return area_down(accumulate(codes, schedule, bits, len(schedule)), (1, 1)).reshape(bits)


def _contribution(codes: Array, scale: int, schedule: Schedule, bits: int) -> Array:
    return bilinear_up(codes_to_values(codes, bits), schedule[-1]) * np.float32(0.8**scale)


def _area_rows(values: Array, size: int) -> Array:
    source = values.shape[1]
    rows = []
    for row in range(size):
        start, end = row * source // size, math.ceil((row + 1) * source / size)
        weight = np.float32(1 / (end - start))
        total = values[:, start] * weight
        for position in range(start + 1, end):
            total += values[:, position] * weight
        rows.append(total)
    return np.stack(rows, axis=1)


def _bilinear_rows(values: Array, size: int) -> Array:
    source = values.shape[1]
    rows = []
    for row in range(size):
        centre = max((row + 0.5) * source / size - 0.5, 0.0)
        low = min(int(centre), source - 1)
        high = min(low + 1, source - 1)
        fraction = np.float32(centre - low)
        rows.append(values[:, low] * (np.float32(1) - fraction) + values[:, high] * fraction)
    return np.stack(rows, axis=1)
