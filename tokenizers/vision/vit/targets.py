"""What the semantic encoder learns from: drawings with names, and what the teacher sees in each.

The teacher costs several times what the learner does, so it looks at each drawing once, plain and large; the
learner then meets the drawing in many views.

Shape legend: n drawings, h x w cells, C channels of the teacher.
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
from ernie5.tokenizers.vision.training.data import (
    PICTURE_FILES,
    PICTURE_GRID,
    TrainingData,
    load_training_data,
)
from ernie5.tokenizers.vision.training.teacher import CELL_WIDTH, WHOLE_WIDTH, Teacher

TEACHER_SIDE = 160
"""Pixels at which the teacher sees a drawing. By its features 57 % of 169 held-out emoji found their like in
another style at 64 pixels, 63 % at 128, 70 % at 160, 73 % at 224."""
_FORMAT = "1"
_BATCH = 32
_SAVE_BATCHES = 32

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
class Targets:
    """What the teacher sees in each training drawing, whole and in the middle of its canvas.

    ``cells`` float16 [n, 112, 8, 8], a vector for each of the tokenizer's cells, and ``wholes`` float16
    [n, 1280].
    """

    cells: Tensor
    wholes: Tensor


def load_vit_data(folder: Path) -> VitData:
    """What :func:`~ernie5.tokenizers.vision.training.data.load_training_data` reads, with the names."""
    arrays = load_training_data(folder)
    names: list[str] = []
    held_out: list[str] = []
    for file in PICTURE_FILES:
        with np.load(folder / f"{file}.npz", allow_pickle=False) as stored:
            for name, test in zip(stored["names"].tolist(), stored["test"].tolist()):
                (held_out if test else names).append(str(name).lower())
    return VitData(arrays, tuple(names), tuple(held_out))


def draw_views(sprites: np.ndarray, size: tuple[int, int], random: torch.Generator | None) -> Tensor:
    """Drawings uint8 ``[b, 96, 96, 4]`` on canvases of ``size`` (height, width) pixels.

    Args:
        sprites: RGBA, not premultiplied.
        size: of the canvas.
        random: draws scale, shift, mirroring and background; without it the whole drawing is centred on
            white.

    Returns:
        float32 ``[b, 3, height, width]`` in [0, 1].
    """
    count, (height, width) = len(sprites), size
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


def canvas_of(grid: Grid) -> tuple[int, int]:
    """Pixels of the learner's canvas of a grid of cells."""
    return STRIDE * grid[0], STRIDE * grid[1]


def ask_teacher(sprites: np.ndarray, teacher: Teacher, path: Path) -> Targets:
    """What the teacher sees in each drawing, uint8 ``[n, 96, 96, 4]``: about 3 minutes of one core for 6,000.

    Kept in ``path`` (safetensors) as it grows: an interrupted call goes on, a repeated one reads. Answers of
    another teacher, or for another number of drawings, are asked anew.
    """
    identity = {
        "format": _FORMAT,
        "identity": json.dumps({"teacher": teacher.source, "side": TEACHER_SIDE, "drawings": len(sprites)}),
    }
    known = _load(path, identity)
    cells, wholes = [known.cells], [known.wholes]
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"))
    with Progress(*columns, TimeElapsedColumn()) as progress, torch.inference_mode():
        bar = progress.add_task("what the teacher sees", total=len(sprites), completed=len(known.wholes))
        for number, start in enumerate(range(len(known.wholes), len(sprites), _BATCH)):
            views = draw_views(sprites[start : start + _BATCH], (TEACHER_SIDE, TEACHER_SIDE), None)
            seen, whole = teacher.describe(views)
            cells.append(F.adaptive_avg_pool2d(seen, PICTURE_GRID).half())
            wholes.append(whole.half())
            progress.advance(bar, len(views))
            if number % _SAVE_BATCHES == _SAVE_BATCHES - 1:
                _save(Targets(torch.cat(cells), torch.cat(wholes)), path, identity)
    targets = Targets(torch.cat(cells), torch.cat(wholes))
    if len(cells) > 1:
        _save(targets, path, identity)
    return targets


def _save(targets: Targets, path: Path, identity: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({"cells": targets.cells, "wholes": targets.wholes}, part, identity)
    os.replace(part, path)


def _load(path: Path, identity: dict[str, str]) -> Targets:
    """What is in ``path``; nothing where it is missing or answers another question."""
    nothing = Targets(torch.zeros(0, CELL_WIDTH, *PICTURE_GRID).half(), torch.zeros(0, WHOLE_WIDTH).half())
    if not path.is_file():
        return nothing
    with safe_open(path, framework="pt") as file:
        if file.metadata() != identity:
            return nothing
    tensors = load_file(path)
    return Targets(tensors["cells"], tensors["wholes"])
