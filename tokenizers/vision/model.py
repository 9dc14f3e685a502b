"""The picture autoencoder: a small, fully convolutional network of stride 8, so any grid works.

Shape legend: B pictures, H = 8 h and W = 8 w pixels, h x w cells, C = trunk width, d = bits a cell.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor, nn
from torch.nn import functional as F

STRIDE = 8
_GROUPS = 8


@dataclass(frozen=True, slots=True)
class VisionModelConfig:
    """Sizes of the autoencoder.

    ``width`` is the number of channels at stride 4; half of it (rounded to a multiple of 8) works at stride 2
    and twice as many (the trunk) at stride 8. ``bits`` is d, the bits of one cell's code.
    """

    width: int = 48
    bits: int = 16
    encoder_blocks: int = 1
    decoder_blocks: int = 2

    def __post_init__(self) -> None:
        if self.width < 16 or self.width % 16:
            raise ValueError(f"width {self.width} is not a positive multiple of 16")
        if not 1 <= self.bits <= 32:
            raise ValueError(f"bits {self.bits} is outside [1, 32]")

    @property
    def trunk_width(self) -> int:
        return 2 * self.width

    def as_json(self) -> dict[str, int]:
        return asdict(self)


class ResidualBlock(nn.Module):
    """GroupNorm, SiLU, 3x3, SiLU, 3x3; starts as the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(self.norm(x)))))


def _upsample(channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 4 * out_channels, 1), nn.PixelShuffle(2))


class VisionModel(nn.Module):
    """Encoder and decoder; the quantiser between them is :mod:`ernie5.kernels.scales`, free of parameters."""

    def __init__(self, config: VisionModelConfig) -> None:
        super().__init__()
        self.config = config
        width, trunk, bits = config.width, config.trunk_width, config.bits
        stem = -(-width // 16) * 8
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, stem, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(stem, width, 2, stride=2),
            *(ResidualBlock(width) for _ in range(config.encoder_blocks)),
            nn.Conv2d(width, trunk, 2, stride=2),
            *(ResidualBlock(trunk) for _ in range(config.encoder_blocks + 1)),
            nn.GroupNorm(_GROUPS, trunk),
        )
        self.to_latent = nn.Conv2d(trunk, bits, 1)
        self.from_latent = nn.Conv2d(bits, trunk, 3, padding=1)
        self.decoder = nn.Sequential(
            *(ResidualBlock(trunk) for _ in range(config.decoder_blocks + 1)),
            _upsample(trunk, width),
            *(ResidualBlock(width) for _ in range(config.decoder_blocks)),
            _upsample(width, stem),
            ResidualBlock(stem),
            nn.GroupNorm(_GROUPS, stem),
            nn.SiLU(),
            nn.Conv2d(stem, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def encode(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures ``[B, 3, H, W]`` in [0, 1] to trunk ``[B, C, h, w]`` and latent ``[B, d, h, w]``.

        The trunk is normalised and comes before the projection to d channels.
        """
        if pictures.shape[-1] % STRIDE or pictures.shape[-2] % STRIDE:
            raise ValueError(f"picture of shape {tuple(pictures.shape)} is not a multiple of {STRIDE} pixels")
        trunk = self.encoder(pictures * 2 - 1)
        return trunk, self.to_latent(F.silu(trunk))

    def decode(self, quantised: Tensor) -> Tensor:
        """A sum of scales ``[B, d, h, w]`` to pictures ``[B, 3, H, W]``, about [0, 1], not clamped."""
        # Scales hold ±1/sqrt(d); the factor brings them back to about ±1.
        return (self.decoder(self.from_latent(quantised * self.config.bits**0.5)) + 1) / 2


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
