"""Clips for the video tokenizer: animations, pictures that move over others, handwritten digits that drift.

Every batch is a pure function of (seed, step), as for pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.tokenizers.vision.model import STRIDE
from ernie5.tokenizers.vision.training.data import (
    DIGIT_GRID,
    OTHER_GRIDS,
    PICTURE_GRID,
    TrainingData,
    load_training_data,
)

CLIP_FILE = "motion"
# Shares of the batches by what moves in them; the rest are moving pictures on the usual canvas.
_ANIMATED, _DIGITS, _OTHER_GRIDS = 0.5, 0.08, 0.1
# Shares of the clips that stand still and of those that are cut: both are met in real ones.
_STILL, _CUT = 0.12, 0.08

VIDEO_DATA_CARD: dict[str, object] = {
    "data": {
        "motion": "animated Fluent emoji (npm @lobehub/fluent-emoji-anim-1 1.0.0), 12 frames a second",
        "moving pictures": "the drawings and digits of the picture weights, moved at random",
    },
    "licences": {"motion": "MIT (as the package states)"},
    "held_out": "concepts marked `test` in the built corpora",
}


@dataclass(frozen=True)
class VideoData:
    """Arrays in memory.

    ``frames`` uint8 ``[n, 64, 64, 3]``: the animations' frames end to end, of clip i from ``offsets[i]`` to
    ``offsets[i + 1]``; ``train`` and ``test`` list clips. ``pictures`` has what moves otherwise.
    """

    frames: np.ndarray
    offsets: np.ndarray
    names: tuple[str, ...]
    train: np.ndarray
    test: np.ndarray
    pictures: TrainingData

    def clip(self, index: int) -> np.ndarray:
        """Uint8 ``[T, 64, 64, 3]``."""
        return self.frames[self.offsets[index] : self.offsets[index + 1]]


def load_video_data(folder: Path) -> VideoData:
    """Read ``motion.npz`` (frames, offsets, names, test) and the pictures beside it.

    Raises:
        FileNotFoundError: names the missing file and the command that builds it.
    """
    path = folder / f"{CLIP_FILE}.npz"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; build it with `ernie-multi corpus build motion` and "
            f"`ernie-multi tokenizer data video --out {folder}`"
        )
    with np.load(path, allow_pickle=False) as arrays:
        frames, offsets, names, test = (arrays[name] for name in ("frames", "offsets", "names", "test"))
    return VideoData(
        frames=frames,
        offsets=offsets,
        names=tuple(map(str, names)),
        train=np.flatnonzero(~test),
        test=np.flatnonzero(test),
        pictures=load_training_data(folder),
    )


class ClipSampler:
    """Draws training clips; see :meth:`draw`."""

    def __init__(self, data: VideoData, *, clips: int, frames: int, seed: int) -> None:
        if frames < 2:
            raise ValueError(f"clips of {frames} frame(s) show no time")
        self.data, self.clips, self.frames, self.seed = data, clips, frames, seed

    def draw(self, step: int) -> Tensor:
        """The clips of ``step``: float32 ``[B, T, 3, H, W]`` in [0, 1], all on one canvas size."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + step + 250_000_000)
        kind = float(torch.rand((), generator=random))
        if kind < _DIGITS:
            return self._cut(self._drifting_digits(2 * self.clips, random), random)
        if kind < _DIGITS + _OTHER_GRIDS:
            grid = OTHER_GRIDS[int(torch.randint(len(OTHER_GRIDS), (), generator=random))]
            return self._cut(self._moving(grid, random), random)
        if kind < _DIGITS + _OTHER_GRIDS + _ANIMATED:
            return self._cut(self._animated(random), random)
        return self._cut(self._moving(PICTURE_GRID, random), random)

    def _moving(self, grid: tuple[int, int], random: torch.Generator) -> Tensor:
        return moving_pictures(self.data.pictures.sprites, self.clips, self.frames, grid, random)

    def _animated(self, random: torch.Generator) -> Tensor:
        """Stretches of animations, at their rate, half or a third of it, mirrored, recoloured, backwards."""
        clips = []
        for _ in range(self.clips):
            index = int(self.data.train[int(torch.randint(len(self.data.train), (), generator=random))])
            frames = self.data.clip(index)
            stride = int(torch.randint(1, 4, (), generator=random))
            start = int(torch.randint(len(frames), (), generator=random))
            at = (start + stride * np.arange(self.frames)) % len(frames)  # the animations are loops
            clip = torch.from_numpy(frames[at]).permute(0, 3, 1, 2).float() / 255
            turns = torch.rand(4, generator=random)
            if turns[0] < 0.5:
                clip = clip.flip(3)
            if turns[1] < 0.3:
                clip = clip.flip(0)
            if turns[2] < 0.3:
                clip = clip[:, torch.randperm(3, generator=random)]
            if turns[3] < 0.3:
                clip = (clip * (1 + (torch.rand(3, 1, 1, generator=random) - 0.5) * 0.4)).clamp(0, 1)
            clips.append(clip)
        return torch.stack(clips)

    def _drifting_digits(self, count: int, random: torch.Generator) -> Tensor:
        """Digits in ink on black (or the reverse) that drift at an even speed over a 32x32 canvas."""
        digits = self.data.pictures.digits
        index = torch.randint(len(digits), (count,), generator=random).numpy()
        ink = torch.from_numpy(digits[index]).float().unsqueeze(1) / 255
        height, width = DIGIT_GRID[0] * STRIDE, DIGIT_GRID[1] * STRIDE
        motion = _paths(count, self.frames, random)
        drawn = _draw(ink, motion, height, width, height / 28)
        inverted = torch.rand(count, 1, 1, 1, 1, generator=random) < 0.1
        return torch.where(inverted, 1 - drawn, drawn).expand(-1, -1, 3, -1, -1)

    def _cut(self, clips: Tensor, random: torch.Generator) -> Tensor:
        """Let some clips change into another of the batch somewhere."""
        for index in (torch.rand(len(clips), generator=random) < _CUT).nonzero().flatten().tolist():
            other = int(torch.randint(len(clips), (), generator=random))
            at = int(torch.randint(1, clips.shape[1], (), generator=random))
            clips = clips.clone()
            clips[index, at:] = clips[other, at:]
        return clips


def moving_pictures(
    sprites: np.ndarray, count: int, frames: int, grid: tuple[int, int], random: torch.Generator
) -> Tensor:
    """Clips ``[count, frames, 3, H, W]`` of two pictures moving over each other on a plain ground.

    Each has a speed of its own in place, size and angle; the one behind may stand still and fill the canvas
    (a camera's background), and a share of the clips stand still altogether.
    """
    height, width = grid[0] * STRIDE, grid[1] * STRIDE
    short = min(height, width)
    ground = torch.rand(count, 1, 3, 1, 1, generator=random)
    white = torch.rand(count, 1, 1, 1, 1, generator=random) < 0.4
    canvas = torch.where(white, torch.ones_like(ground), ground).expand(-1, frames, -1, height, width)
    for depth in range(2):
        index = torch.randint(len(sprites), (count,), generator=random).numpy()
        picture = torch.from_numpy(sprites[index]).permute(0, 3, 1, 2).float() / 255
        layers = torch.cat([picture[:, :3] * picture[:, 3:], picture[:, 3:]], 1)
        side = min(96, short)
        layers = F.interpolate(layers, size=side, mode="bilinear", antialias=True, align_corners=False)
        scale = 1.6 if depth == 0 else 1.0  # the one behind is drawn larger and often missing
        drawn = _draw(layers, _paths(count, frames, random), height, width, scale * short / side)
        shown = torch.rand(count, 1, 1, 1, 1, generator=random) < (0.4 if depth == 0 else 1.0)
        drawn = drawn * shown
        canvas = drawn[:, :, :3] + canvas * (1 - drawn[:, :, 3:])
    return canvas


@dataclass(frozen=True)
class _Paths:
    """Of each clip and frame: where the picture's centre lies (in halves of the shorter side), its size and
    angle; all ``[B, T]`` but ``place`` ``[B, T, 2]`` (y, x).
    """

    place: Tensor
    size: Tensor
    angle: Tensor


def _paths(count: int, frames: int, random: torch.Generator) -> _Paths:
    """Even speeds from random beginnings; a share stands still."""
    time = torch.arange(frames).float() - (frames - 1) / 2
    moving = (torch.rand(count, 1, generator=random) >= _STILL).float()

    def normal(spread: float) -> Tensor:
        return torch.randn(count, 1, generator=random) * spread

    # A speed of 0.03 halves a frame is a pixel a frame on a 64x64 canvas.
    speed = torch.stack([normal(0.06), normal(0.06)], 2)
    start = torch.stack([normal(0.2), normal(0.2)], 2)
    size = torch.empty(count, 1).uniform_(0.6, 1.2, generator=random) * torch.exp(
        normal(0.03) * moving * time
    )
    return _Paths(
        start + speed * (moving * time).unsqueeze(2),
        size,
        normal(0.15) + normal(0.05) * moving * time,
    )


def _draw(layers: Tensor, paths: _Paths, height: int, width: int, scale: float) -> Tensor:
    """``layers`` ``[B, c, s, s]`` moved along the paths: ``[B, T, c, H, W]``, zeros outside them.

    ``scale`` is the picture's side over ``s`` at size 1, in canvas pixels.
    """
    count, channels, side, _ = layers.shape
    frames = paths.size.shape[1]
    drawn_side = side * scale * paths.size
    short = min(height, width)
    cosine, sine = torch.cos(paths.angle), torch.sin(paths.angle)
    theta = torch.zeros(count, frames, 2, 3)
    # From canvas coordinates in [-1, 1] to the picture's: shift, turn, shrink.
    x, y = width / drawn_side, height / drawn_side
    theta[..., 0, 0], theta[..., 0, 1] = cosine * x, sine * y
    theta[..., 1, 0], theta[..., 1, 1] = -sine * x, cosine * y
    centre_y, centre_x = paths.place[..., 0] * short / height, paths.place[..., 1] * short / width
    theta[..., 0, 2] = -(theta[..., 0, 0] * centre_x + theta[..., 0, 1] * centre_y)
    theta[..., 1, 2] = -(theta[..., 1, 0] * centre_x + theta[..., 1, 1] * centre_y)
    size = [count * frames, channels, height, width]
    places = F.affine_grid(theta.flatten(0, 1), size, align_corners=False)
    repeated = layers.unsqueeze(1).expand(-1, frames, -1, -1, -1).flatten(0, 1)
    return F.grid_sample(repeated, places, align_corners=False).unflatten(0, (count, frames))


def held_out_clips(data: VideoData, frames: int, seed: int = 0) -> dict[str, Tensor]:
    """Clips never trained on, by kind, float32 ``[n, T, 3, 64, 64]``.

    ``animated``: held-out animations from their first frame on, looped where shorter; ``moving``: held-out
    drawings moved at random; ``still``: the first frames of the animations, held.
    """
    chosen = []
    for index in data.test:
        clip = data.clip(int(index))
        chosen.append(clip[np.arange(frames) % len(clip)])
    animated = torch.from_numpy(np.stack(chosen)).permute(0, 1, 4, 2, 3).float() / 255
    random = torch.Generator().manual_seed(seed)
    held = torch.from_numpy(data.pictures.held_out).permute(0, 2, 3, 1)
    alpha = torch.full((*held.shape[:3], 1), 255, dtype=torch.uint8)
    sprites = torch.cat([held, alpha], 3).numpy()
    moving = moving_pictures(sprites, len(animated), frames, PICTURE_GRID, random)
    still = animated[:, :1].expand(-1, frames, -1, -1, -1)
    return {"animated": animated, "moving": moving, "still": still}
