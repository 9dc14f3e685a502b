"""What the semantic encoder learns from: views of the training drawings, and what the teacher sees in them.

The teacher costs more than the learner, so it looks once: at each drawing as a whole, large and plain, and at
a few views cell by cell, at twice the learner's size so that its stride of 16 gives the learner's cells.

Shape legend: n drawings, v views on one grid of h x w cells, C channels of the teacher.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from ernie5.tokenizers.vision.model import STRIDE
from ernie5.tokenizers.vision.teacher import Teacher
from ernie5.tokenizers.vision.training_data import (
    OTHER_GRIDS,
    PICTURE_FILES,
    PICTURE_GRID,
    TrainingData,
    load_training_data,
)

WHOLE_SIDE = 160
"""Pixels at which the teacher sees a whole drawing. It tells drawings apart better than at 128 (docs: table)."""
_FORMAT = "1"
_BATCH = 32

Grid = tuple[int, int]


@dataclass(frozen=True)
class VitData:
    """Arrays of the picture tokenizer's recipe, and what the drawings show.

    ``names`` of ``arrays.sprites`` and ``held_out_names`` of ``arrays.held_out``, in their order.
    """

    arrays: TrainingData
    names: tuple[str, ...]
    held_out_names: tuple[str, ...]

    @property
    def concepts(self) -> np.ndarray:
        """int64 [n], equal where names are: a drawing in several styles is one concept."""
        return np.unique(np.array(self.names), return_inverse=True)[1].astype(np.int64)


@dataclass(frozen=True)
class Views:
    """Views on one grid: ``pictures`` uint8 [v, 3, 8 h, 8 w], ``sprite`` int64 [v] indices of drawings, and the
    teacher's ``cells`` float16 [v, C, h, w], None where no teacher is at hand."""

    pictures: Tensor
    sprite: Tensor
    cells: Tensor | None


@dataclass(frozen=True)
class Targets:
    """``views`` by grid and the teacher's ``wholes`` float16 [n, 1280], None without a teacher."""

    views: dict[Grid, Views]
    wholes: Tensor | None


def load_vit_data(folder: Path) -> VitData:
    """Read the arrays as :func:`~ernie5.tokenizers.vision.training_data.load_training_data` does, with names."""
    arrays = load_training_data(folder)
    names: list[str] = []
    held_out: list[str] = []
    for file in PICTURE_FILES:
        with np.load(folder / f"{file}.npz", allow_pickle=False) as stored:
            for name, test in zip(stored["names"].tolist(), stored["test"].tolist()):
                (held_out if test else names).append(str(name).lower())
    return VitData(arrays, tuple(names), tuple(held_out))


def draw_views(sprites: np.ndarray, grid: Grid, random: torch.Generator | None) -> Tensor:
    """Drawings uint8 ``[b, 96, 96, 4]`` on canvases of twice the size of ``grid``.

    Args:
        sprites: RGBA, not premultiplied.
        grid: h x w cells of the learner.
        random: draws scale, shift, mirroring and background; without it the whole drawing is centred on white.

    Returns:
        float32 ``[b, 3, 16 h, 16 w]`` in [0, 1].
    """
    count = len(sprites)
    height, width = 2 * STRIDE * grid[0], 2 * STRIDE * grid[1]
    layers = torch.from_numpy(sprites).permute(0, 3, 1, 2).float() / 255
    layers = torch.cat([layers[:, :3] * layers[:, 3:], layers[:, 3:]], 1)
    zoom, shift = torch.ones(count), torch.zeros(count, 2)
    mirror, background = torch.ones(count), torch.ones(count, 3, 1, 1)
    if random is not None:
        zoom = torch.empty(count).uniform_(0.7, 1.2, generator=random)
        shift = (torch.rand(count, 2, generator=random) - 0.5) * 0.5
        mirror = torch.randint(2, (count,), generator=random) * 2.0 - 1
        white = torch.rand(count, 1, 1, 1, generator=random) < 0.5
        background = torch.where(white, background, torch.rand(count, 3, 1, 1, generator=random))
    short = min(height, width)
    # From places on the canvas to places on the drawing; zoom 1 shows all of it along the shorter side.
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = width / short * zoom * mirror
    theta[:, 1, 1] = height / short * zoom
    theta[:, 0, 2] = shift[:, 0] * width / short
    theta[:, 1, 2] = shift[:, 1] * height / short
    if short < layers.shape[-1]:  # grid_sample doesn't low-pass
        layers = F.interpolate(layers, size=short, mode="bilinear", antialias=True, align_corners=False)
    places = F.affine_grid(theta, [count, 4, height, width], align_corners=False)
    drawn = F.grid_sample(layers, places, align_corners=False)
    return (drawn[:, :3] + background * (1 - drawn[:, 3:])).clamp(0, 1)


def halve(doubled: Tensor) -> Tensor:
    """Teacher's canvases to the learner's: means of 2x2 pixels."""
    return F.avg_pool2d(doubled, 2)


def make_targets(data: VitData, teacher: Teacher | None, *, seed: int = 0, views: int = 2) -> Targets:
    """Draw ``views`` of every drawing, the first plain, a quarter of the others on oblong or small grids.

    A pure function of its arguments. About 7 minutes of one core for 7,000 drawings with the teacher, seconds
    without.
    """
    sprites = data.arrays.sprites
    random = torch.Generator().manual_seed(seed)
    placed: dict[Grid, list[int]] = {PICTURE_GRID: []}
    for _ in range(views - 1):
        other = torch.rand(len(sprites), generator=random) < 0.25
        choice = torch.randint(len(OTHER_GRIDS), (len(sprites),), generator=random)
        for index in range(len(sprites)):
            placed.setdefault(OTHER_GRIDS[int(choice[index])] if other[index] else PICTURE_GRID, []).append(
                index
            )
    # (grid, drawings, whether they are placed at random).
    work = [
        (grid, members[start : start + _BATCH], is_placed)
        for grid, members, is_placed in (
            (PICTURE_GRID, list(range(len(sprites))), False),
            *((grid, members, True) for grid, members in placed.items()),
        )
        for start in range(0, len(members), _BATCH)
    ]
    pictures: dict[Grid, list[Tensor]] = {grid: [] for grid in placed}
    cells: dict[Grid, list[Tensor]] = {grid: [] for grid in placed}
    shown: dict[Grid, list[int]] = {grid: [] for grid in placed}
    wholes: list[Tensor] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress, torch.inference_mode():
        bar = progress.add_task("views of the drawings", total=sum(len(members) for _, members, _ in work))
        for grid, members, is_placed in work:
            doubled = draw_views(sprites[members], grid, random if is_placed else None)
            pictures[grid].append((halve(doubled) * 255).round().to(torch.uint8))
            shown[grid] += members
            if teacher is not None:
                cells[grid].append(teacher.cells(doubled).half())
                if not is_placed:
                    large = F.interpolate(doubled, size=WHOLE_SIDE, mode="bilinear", align_corners=False)
                    wholes.append(teacher.whole(large).half())
            progress.advance(bar, len(members))
    drawn = {
        grid: Views(
            torch.cat(parts), torch.tensor(shown[grid]), torch.cat(cells[grid]) if cells[grid] else None
        )
        for grid, parts in pictures.items()
        if parts
    }
    return Targets(drawn, torch.cat(wholes) if wholes else None)


def save_targets(targets: Targets, path: Path, identity: dict[str, object]) -> None:
    """Write ``path`` (safetensors), complete or not at all; ``identity`` says what they were made from."""
    tensors: dict[str, Tensor] = {}
    for (height, width), views in targets.views.items():
        name = f"{height}x{width}"
        tensors |= {f"{name}.pictures": views.pictures, f"{name}.sprite": views.sprite}
        if views.cells is not None:
            tensors[f"{name}.cells"] = views.cells
    if targets.wholes is not None:
        tensors["wholes"] = targets.wholes
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, _metadata(identity))
    os.replace(part, path)


def load_targets(path: Path, identity: dict[str, object]) -> Targets | None:
    """Read what :func:`save_targets` wrote; None where there is nothing, or something of another identity."""
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        if file.metadata() != _metadata(identity):
            return None
    tensors = load_file(path)
    views = {}
    for name in sorted(key.removesuffix(".sprite") for key in tensors if key.endswith(".sprite")):
        height, width = map(int, name.split("x"))
        views[height, width] = Views(
            tensors[f"{name}.pictures"], tensors[f"{name}.sprite"], tensors.get(f"{name}.cells")
        )
    return Targets(views, tensors.get("wholes"))


def _metadata(identity: dict[str, object]) -> dict[str, str]:
    return {"format": _FORMAT, "identity": json.dumps(identity, sort_keys=True)}
