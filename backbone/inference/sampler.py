"""Draws of tokens, bits and audio codes. Each is a function of logits and of uniform numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, position: int, count: int) -> np.ndarray:
    """``count`` numbers in [0, 1) that depend on the request's seed and the position alone.

    Counter-based, so a resumed request goes on with the numbers it would have had.
    """
    key = [seed & (2**64 - 1), position]
    return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64))).random(count, np.float32)


def draw(logits: Tensor, uniform: float, temperature: float, top_p: float = 1.0, top_k: int = 0) -> int:
    """One class from logits ``[n]``: greedy at temperature 0, else nucleus and top-k sampling."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits / temperature
    if top_k and top_k < len(scaled):
        scaled = torch.where(scaled < scaled.topk(top_k).values[-1], -torch.inf, scaled)
    probability = torch.softmax(scaled, -1)
    if top_p >= 1:
        return _inverse(probability, uniform)
    ordered, index = probability.sort(descending=True, stable=True)
    # The smallest prefix that reaches top_p; the likeliest class always stays.
    kept = ordered * ((ordered.cumsum(0) - ordered) < top_p)
    return int(index[_inverse(kept / kept.sum(), uniform)])


def draw_rows(logits: Tensor, uniform: Tensor, temperature: Tensor) -> Tensor:
    """One class a row from ``[b, n]``, each row with its own uniform number and temperature ``[b]``."""
    greedy = logits.argmax(-1)
    scaled = logits / temperature.clamp(min=1e-6)[:, None]
    cumulative = torch.softmax(scaled, -1).cumsum(-1)
    drawn = (cumulative <= (uniform * cumulative[:, -1])[:, None]).sum(-1).clamp(max=logits.shape[-1] - 1)
    return torch.where(temperature == 0, greedy, drawn)


def draw_bits(log_odds: Tensor, uniform: np.ndarray, temperature: float) -> np.ndarray:
    """Codes uint32 ``[cells]`` from log-odds ``[cells, bits]``; bit 0 is channel 0."""
    if temperature == 0:
        ones = (log_odds > 0).numpy()
    else:
        probability = torch.sigmoid(log_odds / temperature).numpy()
        ones = uniform.reshape(probability.shape) < probability
    weight = np.left_shift(np.uint32(1), np.arange(ones.shape[-1], dtype=np.uint32))
    return (ones * weight).sum(-1, dtype=np.uint32)


def _inverse(probability: Tensor, uniform: float) -> int:
    cumulative = probability.cumsum(0)
    index = int((cumulative <= uniform * float(cumulative[-1])).sum())
    return min(index, len(probability) - 1)
