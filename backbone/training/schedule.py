"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math


def warmup_stable_decay(
    step: int, steps: int, *, warmup: int, decay: float = 0.3, floor: float = 0.0
) -> float:
    """WSD factor in [0, 1]: linear warm-up, constant, then a cosine over the last ``decay`` share.

    The report trains with a warm-up of 2,000 steps, a constant phase and a later cosine (section 3).
    """
    if step < warmup:
        return (step + 1) / warmup
    start = steps * (1 - decay)
    if step < start:
        return 1.0
    done = min(1.0, (step - start) / max(1.0, steps - start))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
