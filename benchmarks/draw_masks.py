"""Draws the attention masks that have builders: query rows downwards, key columns to the right.

python benchmarks/draw_masks.py

writes docs/pictures/masks.png. Visible pairs are coloured, darker where the tile of 8 by 8 is full (needs no
test of its elements); white tiles are skipped.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from ernie5.kernels.flashmask import MaskPlan, masks, spans

OUT = Path(__file__).parents[1] / "docs" / "pictures" / "masks.png"
N, TILE = 96, 8
COLOURS = ListedColormap(
    ["#ffffff", "#e9edf2", "#7fb2e5", "#1f5f9f"]
)  # skipped, masked, in a partial tile, full


def examples() -> dict[str, Tensor]:
    """Names to masks of N rows and columns."""
    n = N
    generator = torch.Generator().manual_seed(0)
    dropped = torch.zeros(n, dtype=torch.bool)
    dropped[12:28] = dropped[56:72] = True
    text = spans.text
    return {
        "full": masks.full(n, n),
        "causal": masks.causal(n, n),
        "sliding window": masks.sliding_window(n, n, 19),
        "causal document": masks.causal_document(n, n, [20, 44, 32]),
        "document": masks.document(n, n, [20, 44, 32]),
        "share question": masks.share_question(n, n, [[16, 16, 16], [20, 14, 14]]),
        "global + sliding window": masks.global_sliding_window(n, n, 10, 12, 12),
        "causal blockwise": masks.causal_blockwise(n, n, [24, 30, 20, 22]),
        "prefix-LM document": masks.prefix_lm_document(n, n, [(20, 20), (16, 40)]),
        "prefix-LM causal": masks.prefix_lm_causal(n, n, 36),
        "QK-sparse": masks.qk_sparse(n, n, dropped),
        "random eviction": masks.random_eviction(n, n, masks.random_evictions(n, 1, 32, generator)),
        "text, scales of a picture": spans.packed(n, n, [[text(12), spans.blocks([4, 16, 36]), text(28)]]),
        "window of grid rows": spans.packed(n, n, [[text(8), spans.image_window(8, 8, 1), text(24)]]),
        "sound: window + anchors": spans.packed(n, n, [[text(8), spans.sound_window(64, 12, 16), text(24)]]),
        "video: dropped history": spans.packed(
            n, n, [[text(8), spans.video([16] * 4, [0, 1, 0, 1]), text(24)]]
        ),
        "window by length": spans.dynamic_window(n, n, [20, 76], torch.tensor([20, 14]), sinks=3),
        "packed row": spans.packed(
            n,
            n,
            [
                [text(6), spans.blocks([16]), text(6)],
                [text(4), spans.sound_window(28, 6, 8), text(4)],
                [text(4), spans.blocks([4, 16]), text(4)],
            ],
        ),
    }


def shades(mask: Tensor) -> Tensor:
    """Per pair 0 in a skipped tile, 1 masked, 2 visible in a partial tile, 3 in a full one; ``[N, N]``."""
    plan = MaskPlan.from_intervals(mask, N)
    tiles = plan.row_tiles(TILE, TILE)
    kind = torch.zeros(N // TILE, N // TILE, dtype=torch.int64)
    strip = torch.arange(tiles.strips).repeat_interleave(tiles.offsets.diff())
    kind[strip, tiles.entries.long() >> 1] = 2 - (tiles.entries.long() & 1)
    kind = kind.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    return torch.where(plan.dense()[0, 0], kind + 1, kind.clamp(max=1))


def main() -> None:
    drawn = examples()
    figure = Figure(figsize=(12, 7), layout="constrained")
    for axes, (name, mask) in zip(figure.subplots(3, 6).flat, drawn.items()):
        axes.imshow(shades(mask), cmap=COLOURS, vmin=0, vmax=3, interpolation="nearest")
        axes.set_title(name, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(OUT, dpi=110)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
