"""The picture autoencoder: a small, fully convolutional network of stride 8, so any grid works.

One network serves several bit widths. A cell has d latent channels, d the largest width, and the code of a
smaller width is the low bits of the full one: each channel is quantised by itself
(:mod:`ernie5.kernels.scales`), so leaving out the last channels changes no other. A backbone that has learnt
16-bit pictures thus goes on to 24 bits with all its bits still true (the low-to-high switch of ERNIE 5.0
§2.2.1).

Shape legend: B pictures, H = 8 h and W = 8 w pixels, h x w cells, C = trunk width, d = channels = bits of the
largest width.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

STRIDE = 8
_GROUPS = 8


@dataclass(frozen=True, slots=True)
class VisionModelConfig:
    """Sizes of the autoencoder.

    ``width`` is the number of channels at stride 4; half of it (rounded to a multiple of 8) works at stride 2
    and twice as many (the trunk) at stride 8. ``bit_widths`` are the numbers of bits that a cell's code may
    have, rising; the last is d.
    """

    width: int = 48
    bit_widths: tuple[int, ...] = (16, 24)
    encoder_blocks: int = 1
    decoder_blocks: int = 2

    def __post_init__(self) -> None:
        if self.width < 16 or self.width % 16:
            raise ValueError(f"width {self.width} is not a positive multiple of 16")
        if not self.bit_widths or list(self.bit_widths) != sorted(set(self.bit_widths)):
            raise ValueError(f"bit widths {self.bit_widths} do not rise")
        if not 1 <= self.bit_widths[0] <= self.bit_widths[-1] <= 32:
            raise ValueError(f"bit widths {self.bit_widths} are not within [1, 32]")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> VisionModelConfig:
        return cls(**{**values, "bit_widths": tuple(values["bit_widths"])})

    @property
    def bits(self) -> int:
        """d: the bits of the largest width."""
        return self.bit_widths[-1]

    @property
    def trunk_width(self) -> int:
        return 2 * self.width

    def as_json(self) -> dict[str, Any]:
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
        assert self.to_latent.bias is not None
        self.to_latent.bias.requires_grad_(False)  # the trainer balances the coarsest bits with it
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
        """A sum of scales ``[B, bits, h, w]`` to pictures ``[B, 3, H, W]``, about [0, 1], not clamped.

        ``bits`` is one of the bit widths; the channels above it are zero.
        """
        bits = quantised.shape[1]
        # Scales hold ±1/sqrt(bits); the factor brings them back to about ±1.
        channels = F.pad(quantised * bits**0.5, (0, 0, 0, 0, 0, self.config.bits - bits))
        return (self.decoder(self.from_latent(channels)) + 1) / 2

    def latent_of_width(self, latent: Tensor, bits: int) -> Tensor:
        """The channels ``[B, bits, h, w]`` of a latent ``[B, d, h, w]`` that a width codes, at its scale."""
        return latent[:, :bits] * (self.config.bits / bits) ** 0.5


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
