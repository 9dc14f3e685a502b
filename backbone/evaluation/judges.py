"""A small classifier that says which digit a picture shows.

It judges what the model draws, and its own accuracy on decoded real pictures is quoted beside every score. It
trains on real items in seconds, and sees both the originals and their decoded forms, so that the tokenizer's
blur is not taken for the model's fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10
Augment = Callable[[Tensor, torch.Generator], Tensor]


class Judge:
    """A convolutional classifier of ``[n, height, width]`` arrays, standardised one by one."""

    def __init__(self, height: int, width: int, *, classes: int = CLASSES, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            blocks: list[nn.Module] = []
            channels = 1
            for wider in (16, 32, 64):
                blocks += [
                    nn.Conv2d(channels, wider, 3, padding=1),
                    nn.BatchNorm2d(wider),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                ]
                channels = wider
            self.network = nn.Sequential(
                *blocks,
                nn.Flatten(),
                nn.Dropout(0.3),
                nn.Linear(channels * (height // 8) * (width // 8), classes),
            )
        self.seed = seed

    def fit(
        self, inputs: np.ndarray, labels: np.ndarray, augment: Augment, *, steps: int, batch: int = 64
    ) -> Judge:
        """Train on float ``[n, h, w]`` and int ``[n]``; a function of data and seed."""
        generator = torch.Generator().manual_seed(self.seed)
        x, y = torch.from_numpy(np.ascontiguousarray(inputs)).float(), torch.from_numpy(labels).long()
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=2e-3, weight_decay=1e-2)
        self.network.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            for step in range(steps):
                index = torch.randint(len(x), (batch,), generator=generator)
                logits = self.network(_standard(augment(x[index], generator))[:, None])
                loss = F.cross_entropy(logits, y[index], label_smoothing=0.1)
                for group in optimizer.param_groups:
                    group["lr"] = 1e-5 + 2e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
        self.network.eval()
        return self

    @torch.inference_mode()
    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """The class of each of ``[n, h, w]``, int64 ``[n]``."""
        x = torch.from_numpy(np.ascontiguousarray(inputs)).float()
        parts = [self.network(_standard(part)[:, None]).argmax(1) for part in x.split(256)]
        return torch.cat(parts).numpy() if parts else np.zeros(0, np.int64)


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean((1, 2), keepdim=True)) / (x.std((1, 2), keepdim=True) + 1e-3)


def shift_picture(x: Tensor, generator: torch.Generator) -> Tensor:
    """Move a batch of pictures by up to two pixels and add noise."""
    rows, columns = (int(torch.randint(-2, 3, (1,), generator=generator)) for _ in range(2))
    return torch.roll(x, (rows, columns), (1, 2)) + 0.05 * torch.randn(x.shape, generator=generator)
