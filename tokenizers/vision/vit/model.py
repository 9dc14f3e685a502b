"""The second encoder of the understanding path: a small vision transformer on the tokenizer's cells.

The picture tokenizer's own encoder learns to redraw, so its features tell where colours and edges are; this
one learns what is seen (ERNIE 5.0 report, section 2.2.2: a convolutional and a semantic encoder side by
side, mixed by the backbone's merger). Both describe the same cells of 8x8 pixels. Its weights are a file of
their own.

Shape legend: B pictures, H = 8 h and W = 8 w pixels, h x w cells, N = h w of them, D features.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.protocol.errors import UnavailableError
from ernie5.tokenizers.vision.model import STRIDE
from ernie5.tokenizers.vision.weights_file import SHIPPED_WEIGHTS as IMAGE_WEIGHTS
from ernie5.tokenizers.vision.weights_file import read_with_card, write_with_card

# Raise it when the features' meaning changes: preprocessing, network, or what a cell is.
FORMAT_VERSION = 1
SHIPPED_WEIGHTS = IMAGE_WEIGHTS.with_name("vit.safetensors")

# Longest wavelength of the rotary positions in cells; grids have at most 32 cells a side.
_ROTARY_BASE = 100.0
_STEM_WIDTHS = (32, 64)


@dataclass(frozen=True, slots=True)
class VitConfig:
    """Sizes: ``width`` D, ``layers``, attention ``heads``, and ``hidden`` of the feed-forward."""

    width: int = 96
    layers: int = 5
    heads: int = 3
    hidden: int = 384

    def __post_init__(self) -> None:
        if self.width < 1 or self.width % (4 * self.heads):
            raise ValueError(
                f"width {self.width} is not a multiple of 4 x {self.heads} heads; rotary positions turn "
                "pairs for rows and for columns"
            )

    def as_json(self) -> dict[str, int]:
        return asdict(self)


class _Layer(nn.Module):
    """Attention over all cells, then a feed-forward; both start as the identity."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, config.hidden)
        self.project = nn.Linear(config.hidden, width)
        for layer in (self.mix, self.project):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.attention_norm(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind()
        )
        mixed = F.scaled_dot_product_attention(_turn(q, cosine, sine), _turn(k, cosine, sine), v)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.project(F.gelu(self.expand(self.norm(x))))


class VitModel(nn.Module):
    """Pictures to one vector a cell, on any grid.

    A few convolutions cut the picture into cells (they learn faster than one linear layer a patch: Xiao et
    al., arXiv 2106.14881); positions are rotary, half of each head turned by the row and half by the
    column, so no table binds the network to a size.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        fine, coarse = _STEM_WIDTHS
        self.stem = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, fine, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(fine, coarse, 2, stride=2),
            nn.SiLU(),
            nn.Conv2d(coarse, config.width, 2, stride=2),
        )
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures ``[B, 3, H, W]`` in [0, 1] to features ``[B, D, h, w]``."""
        if pictures.shape[-1] % STRIDE or pictures.shape[-2] % STRIDE:
            raise ValueError(f"picture of shape {tuple(pictures.shape)} is not a multiple of {STRIDE} pixels")
        cells = self.stem(pictures * 2 - 1)
        height, width = cells.shape[-2:]
        cosine, sine = _angles(height, width, self.config.width // self.config.heads, cells)
        x = cells.flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.norm(x).transpose(1, 2).unflatten(2, (height, width))


def _angles(height: int, width: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[N, size / 2]``: a quarter of the head's size by row, a quarter by column."""
    frequencies = _ROTARY_BASE ** -(torch.arange(size // 4, device=like.device) / (size // 4))
    rows = torch.arange(height, device=like.device)[:, None] * frequencies
    columns = torch.arange(width, device=like.device)[:, None] * frequencies
    both = torch.cat([rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)], -1).flatten(
        0, 1
    )
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of ``[B, heads, N, size]``, first halves with second halves."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


def save_vit(model: VitModel, path: Path, card: dict[str, object]) -> None:
    """Write ``path`` (float16 safetensors) and the card beside it (``.json``), config and digest added."""
    head = {"format_version": FORMAT_VERSION, "config": model.config.as_json()}
    write_with_card(model.state_dict(), path, head, card)


def load_vit(path: Path | None = None) -> tuple[VitModel, dict[str, object]]:
    """Read a float32 model in evaluation mode and its card; the shipped weights if ``path`` is None.

    Raises:
        UnavailableError: weights or card are missing.
        ValueError: another format version, or weights that are not the ones the card was written for.
    """
    path = path or SHIPPED_WEIGHTS
    for file in (path, path.with_suffix(".json")):
        if not file.is_file():
            raise UnavailableError(
                f"the semantic encoder needs {file}; train one by `ernie-multi tokenizer train vit`"
            )
    card, tensors = read_with_card(path, FORMAT_VERSION)
    model = VitModel(VitConfig(**card["config"]))
    model.load_state_dict(tensors)
    return model.eval(), card


@dataclass(frozen=True, slots=True)
class VitWeights:
    """A model and what names its weights in a tokenizer's hash."""

    model: VitModel
    identity: str


def load_vit_weights(path: Path | None = None) -> VitWeights:
    """:func:`load_vit` for a tokenizer."""
    model, card = load_vit(path)
    return VitWeights(model, f"vit/{FORMAT_VERSION}/{card['sha256']}")
