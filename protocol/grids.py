"""Final grids of pictures and the scale schedule each implies.

A picture is fitted to one of :data:`GRIDS`; its schedule halves the grid down to (1, 1), so the first
scale is always a single cell, which the position before the picture predicts. A generated picture's grid
is chosen by the model itself through a ``grid_HxW`` marker of the unified vocabulary.
"""

from __future__ import annotations

# Height x width in cells; even sides, so that 2x2 neighbours merge into one understanding token.
# The order fixes marker ids; append only.
GRIDS: tuple[tuple[int, int], ...] = (
    (4, 4),
    (6, 6),
    (8, 8),
    (6, 8),
    (8, 6),
    (6, 10),
    (10, 6),
    (4, 8),
    (8, 4),
    (4, 12),
    (12, 4),
    (4, 16),
    (16, 4),
    (12, 12),
    (16, 16),
)


def schedule_for(grid: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Scales (height, width) from (1, 1) to ``grid``, each about twice the one before.

    >>> schedule_for((6, 10))
    ((1, 1), (1, 2), (2, 3), (3, 5), (6, 10))
    """
    height, width = grid
    if height < 1 or width < 1:
        raise ValueError(f"grid {grid} is empty")
    scales = [grid]
    while scales[0] != (1, 1):
        height, width = (height + 1) // 2, (width + 1) // 2
        scales.insert(0, (height, width))
    return tuple(scales)
