"""Waveform codec: samples to codes and back without a mel spectrogram between, for machines with a GPU.

SoundStream's causal convolutions (Zeghidour et al., 2021) at the frame rate and with the quantiser of the
mel codec, so that its spans have the same layout; the discriminators look at complex spectra in several
resolutions (Défossez et al., 2023, section 3.4). Minutes of a processor's core leave it unintelligible,
hours of a GPU do not: the recipe (:mod:`ernie5.tokenizers.audio.waveform_train`) is what the repository
ships of it, not weights.

Shapes: ``B`` clips, ``N`` samples (a multiple of 1280), ``D`` latent dimensions, ``Q`` levels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from ernie5.tokenizers.audio.clips import FRAME_SAMPLES
from ernie5.tokenizers.audio.quantiser import Quantised, ResidualQuantiser


class _Conv(nn.Module):
    """Causal convolution ``[B, C, N]``; ``N / stride`` steps come out."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(inputs, outputs, kernel, stride, dilation=dilation))
        self.before = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.before, 0)))


class _Upsample(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = weight_norm(nn.ConvTranspose1d(inputs, outputs, 2 * stride, stride))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., : -self.stride]


class _Block(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.spread = _Conv(width, width // 2, 3, dilation=dilation)
        self.mix = _Conv(width // 2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.elu(self.spread(F.elu(x))))


class WaveformCodec(nn.Module):
    """Samples ``[B, N]`` to codes ``[B, N / 1280, Q]`` and back."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """``width`` channels at 16 kHz, doubled by each stride."""

        width: int = 32
        strides: tuple[int, ...] = (4, 5, 8, 8)
        dilations: tuple[int, ...] = (1, 3, 9)
        latent: int = 48
        levels: int = 8
        codebook_size: int = 256

        @classmethod
        def from_json(cls, values: dict[str, Any]) -> WaveformCodec.Config:
            lists = {name: tuple(values[name]) for name in ("strides", "dilations")}
            return cls(**{**values, **lists})

        def as_json(self) -> dict[str, Any]:
            return asdict(self)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config = config or WaveformCodec.Config()
        if prod(config.strides) != FRAME_SAMPLES:
            raise ValueError(
                f"strides {config.strides} multiply to {prod(config.strides)}, not {FRAME_SAMPLES}"
            )
        widths = [config.width * 2**stage for stage in range(len(config.strides) + 1)]
        encoder: list[nn.Module] = [_Conv(1, widths[0], 7)]
        decoder: list[nn.Module] = [_Conv(config.latent, widths[-1], 7)]
        for stage, stride in enumerate(config.strides):
            encoder += [_Block(widths[stage], dilation) for dilation in config.dilations]
            encoder += [nn.ELU(), _Conv(widths[stage], widths[stage + 1], 2 * stride, stride)]
        for stage, stride in reversed(list(enumerate(config.strides))):
            decoder += [nn.ELU(), _Upsample(widths[stage + 1], widths[stage], stride)]
            decoder += [_Block(widths[stage], dilation) for dilation in config.dilations]
        self.encoder = nn.Sequential(*encoder, nn.ELU(), _Conv(widths[-1], config.latent, 3))
        self.decoder = nn.Sequential(*decoder, nn.ELU(), _Conv(widths[0], 1, 7))
        self.quantiser = ResidualQuantiser(config.levels, config.codebook_size, config.latent)

    def to_latent(self, samples: Tensor) -> Tensor:
        """``[B, D, N / 1280]`` of ``[B, N]``."""
        if samples.shape[-1] % FRAME_SAMPLES:
            raise ValueError(
                f"{samples.shape[-1]} samples are not a multiple of {FRAME_SAMPLES}; pad the clip"
            )
        return self.encoder(samples[:, None])

    def encode(self, samples: Tensor, levels: int | None = None) -> Tensor:
        """Codes, int64 ``[B, N / 1280, levels]``."""
        return self.quantiser.encode(self.to_latent(samples).float(), levels)

    def decode(self, codes: Tensor) -> Tensor:
        """Samples ``[B, N]`` of codes ``[B, N / 1280, levels]``."""
        return self.decoder(self.quantiser.decode(codes))[:, 0].clamp(-1.0, 1.0)

    def forward(self, samples: Tensor, levels: Tensor) -> tuple[Tensor, Tensor, Quantised]:
        """Training pass: samples ``[B, N]``, latent, codes; ``levels`` int64 ``[B]``."""
        latent = self.to_latent(samples).float()
        quantised = self.quantiser(latent, levels)
        return self.decoder(quantised.vectors)[:, 0].float(), latent, quantised


class SpectralDiscriminator(nn.Module):
    """Judges the complex spectra of samples, one network a resolution."""

    def __init__(self, sizes: tuple[int, ...] = (2048, 1024, 512), width: int = 32) -> None:
        super().__init__()
        self.sizes = sizes
        self.stacks = nn.ModuleList(self._stack(width) for _ in sizes)

    @staticmethod
    def _stack(width: int) -> nn.ModuleList:
        layers = [weight_norm(nn.Conv2d(2, width, (3, 9), padding=(1, 4)))]
        layers += [
            weight_norm(
                nn.Conv2d(width, width, (3, 9), (1, 2), dilation=(dilation, 1), padding=(dilation, 4))
            )
            for dilation in (1, 2, 4)
        ]
        return nn.ModuleList([*layers, weight_norm(nn.Conv2d(width, 1, 3, padding=1))])

    def forward(self, samples: Tensor) -> list[list[Tensor]]:
        """For each resolution the layers' outputs, the last of them the judgement, positive for real."""
        found = []
        for size, stack in zip(self.sizes, self.stacks):
            assert isinstance(stack, nn.ModuleList)
            window = torch.hann_window(size, device=samples.device)
            spectrum = torch.stft(
                samples, size, size // 4, window=window, normalized=True, return_complex=True
            )
            x = torch.stack([spectrum.real, spectrum.imag], dim=1).transpose(2, 3)
            outputs = []
            for layer in stack[:-1]:
                x = F.leaky_relu(layer(x), 0.2)
                outputs.append(x)
            found.append([*outputs, stack[-1](x)])
        return found


def discriminator_loss(real: list[list[Tensor]], made: list[list[Tensor]]) -> Tensor:
    """Hinge loss of the discriminators, mean over resolutions."""
    parts = [F.relu(1.0 - r[-1]).mean() + F.relu(1.0 + m[-1]).mean() for r, m in zip(real, made)]
    return torch.stack(parts).mean()


def adversarial_loss(real: list[list[Tensor]], made: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """The codec's part: how far the made samples are from being taken for real, and from the real ones'
    outputs of the discriminators' layers (relative to these)."""
    fooled = torch.stack([F.relu(1.0 - m[-1]).mean() for m in made]).mean()
    matched = [
        (a.detach() - b).abs().mean() / a.detach().abs().mean().clamp(min=1e-4)
        for r, m in zip(real, made)
        for a, b in zip(r[:-1], m[:-1])
    ]
    return fooled, torch.stack(matched).mean()
