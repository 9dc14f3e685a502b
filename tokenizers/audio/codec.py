"""Causal convolutional codec over log-mel frames, 12.5 latent frames a second.

A latent frame stands for a patch of 8 mel frames. It is the sum of the patch's principal components and of
a convolutional encoder's output, which sees the past too: two mel frames folded into one step of 160 values
(50 steps a second), then two strided stages. The residual quantiser takes 8 codes a frame, and the decoder
mirrors the encoder, linear part and all. The linear parts make the codec useful from its first step on; the
convolutions learn what they miss. Nothing looks ahead, so that a stream can be encoded and decoded frame by
frame. The convolutions follow SoundStream (Zeghidour et al., 2021) with mel frames in place of samples:
minutes on a processor's core train it, where a waveform codec stays unintelligible.

Shapes: ``B`` clips, ``M = BANDS``, ``T`` mel frames (a multiple of 8), ``D`` latent dimensions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ernie5.tokenizers.audio.mel import BANDS, LOG_FLOOR
from ernie5.tokenizers.audio.quantiser import Quantised, ResidualQuantiser

FOLD = 2
FRAME = 8  # mel frames in a latent frame


class CausalConv(nn.Module):
    """Convolution that sees no later step; ``ceil(T / stride)`` steps come out."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride, dilation=dilation)
        self.before = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.before, 0)))


class CausalUpsample(nn.Module):
    """Transposed convolution, kernel twice the stride, its tail of later influence cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, 2 * stride, stride)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., : -self.stride]


class ResidualBlock(nn.Module):
    """Width-preserving block: ELU, dilated convolution of three, ELU, pointwise convolution, gain."""

    def __init__(self, width: int, dilation: int = 1) -> None:
        super().__init__()
        self.spread = CausalConv(width, width, 3, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)
        self.gain = nn.Parameter(torch.full((width, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.mix(F.elu(self.spread(F.elu(x))))


class MelCodec(nn.Module):
    """Log-mel frames to codes and back."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """Widths at 50, 25 and 12.5 steps a second; ``levels`` codebooks of ``codebook_size`` codes."""

        widths: tuple[int, int, int] = (128, 192, 256)
        latent: int = 48
        levels: int = 8
        codebook_size: int = 256

        @classmethod
        def from_json(cls, values: dict[str, Any]) -> MelCodec.Config:
            return cls(**{**values, "widths": tuple(values["widths"])})

        def as_json(self) -> dict[str, Any]:
            return asdict(self)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config = config or MelCodec.Config()
        low, middle, high = config.widths
        last_encoder = nn.Conv1d(high, config.latent, 1)
        last_decoder = CausalConv(low, FOLD * BANDS, 3)
        self.encoder = nn.Sequential(
            CausalConv(FOLD * BANDS, low, 3),
            ResidualBlock(low),
            CausalConv(low, middle, 4, stride=2),
            ResidualBlock(middle),
            CausalConv(middle, high, 4, stride=2),
            ResidualBlock(high),
            ResidualBlock(high, dilation=2),
            nn.ELU(),
            last_encoder,
        )
        self.quantiser = ResidualQuantiser(config.levels, config.codebook_size, config.latent)
        self.decoder = nn.Sequential(
            CausalConv(config.latent, high, 3),
            ResidualBlock(high),
            ResidualBlock(high, dilation=2),
            CausalUpsample(high, middle, 2),
            ResidualBlock(middle),
            ResidualBlock(middle, dilation=2),
            CausalUpsample(middle, low, 2),
            ResidualBlock(low),
            ResidualBlock(low, dilation=2),
            nn.ELU(),
            last_decoder,
        )
        self.analysis = nn.Linear(FRAME * BANDS, config.latent)
        self.synthesis = nn.Linear(config.latent, FRAME * BANDS)
        # Fixed once started: steps that suit the convolutions would wreck them.
        self.analysis.requires_grad_(False)
        self.synthesis.requires_grad_(False)
        for last in (last_encoder, last_decoder.conv):
            nn.init.zeros_(last.weight)
            assert last.bias is not None
            nn.init.zeros_(last.bias)

    @torch.no_grad()
    def start(self, log_mels: Tensor, generator: torch.Generator, rounds: int = 60) -> None:
        """Set the linear parts to principal components of ``log_mels`` and cluster the codebooks.

        Args:
            log_mels: ``[B, M, T]``, some ten thousand latent frames.
            generator: draws the first codes and the batches of the clustering.
            rounds: moving-average updates of the codebooks.
        """
        patches = _patches(_normal(log_mels)).reshape(-1, FRAME * BANDS)
        mean = patches.mean(0)
        covariance = (patches - mean).T @ (patches - mean) / len(patches)
        values, vectors = torch.linalg.eigh(covariance.double())
        components = vectors.flip(1)[:, : self.config.latent].float()
        # One scale for all, so that distances between latents stay distances between patches.
        scale = float(values.flip(0)[: self.config.latent].mean().sqrt())
        self.analysis.weight.copy_(components.T / scale)
        self.analysis.bias.copy_(-(components.T @ mean) / scale)
        self.synthesis.weight.copy_(components * scale)
        self.synthesis.bias.copy_(mean)
        latent = self.analysis(patches)
        self.quantiser.start(latent.T[None], generator)
        for step in range(rounds):
            drawn = torch.randint(len(latent), (6000,), generator=generator)
            batch = latent[drawn].T[None]
            decay, restarts = (0.8, generator) if step < rounds * 3 // 4 else (0.95, None)
            self.quantiser.update(batch, self.quantiser.encode(batch), decay, restarts, step)

    def to_latent(self, log_mels: Tensor) -> Tensor:
        """``[B, D, T / 8]`` of ``[B, M, T]``. Silence maps to zeros, so the causal padding is silence."""
        batch, bands, frames = log_mels.shape
        if frames % FRAME:
            raise ValueError(f"{frames} mel frames are not a multiple of {FRAME}; pad the clip")
        normal = _normal(log_mels)
        folded = normal.reshape(batch, bands, frames // FOLD, FOLD).transpose(2, 3)
        learned = self.encoder(folded.reshape(batch, bands * FOLD, frames // FOLD))
        return self.analysis(_patches(normal)).transpose(1, 2) + learned

    def from_latent(self, latent: Tensor) -> Tensor:
        """Log-mel ``[B, M, T]`` of ``[B, D, T / 8]``; may lie below the floor."""
        folded = self.decoder(latent)
        batch, _, steps = folded.shape
        learned = folded.view(batch, BANDS, FOLD, steps).transpose(2, 3).reshape(batch, BANDS, steps * FOLD)
        patches = self.synthesis(latent.transpose(1, 2)).view(batch, -1, BANDS, FRAME)
        linear = patches.transpose(1, 2).reshape(batch, BANDS, steps * FOLD)
        return (linear + learned) * 2.0 + LOG_FLOOR

    def encode(self, log_mels: Tensor, levels: int | None = None) -> Tensor:
        """Codes, int64 ``[B, T / 8, levels]``, of log-mels ``[B, M, T]``."""
        return self.quantiser.encode(self.to_latent(log_mels), levels)

    def decode(self, codes: Tensor) -> Tensor:
        """Log-mels ``[B, M, T]`` of codes ``[B, T / 8, levels]``."""
        return self.from_latent(self.quantiser.decode(codes)).clamp(min=LOG_FLOOR)

    def forward(self, log_mels: Tensor, levels: int) -> tuple[Tensor, Tensor, Quantised]:
        """Training pass: reconstructed log-mels ``[B, M, T]``, latent ``[B, D, T / 8]``, its codes."""
        latent = self.to_latent(log_mels)
        quantised = self.quantiser(latent, levels)
        return self.from_latent(quantised.vectors), latent, quantised


def _normal(log_mels: Tensor) -> Tensor:
    """Log-mels with silence at zero and a spread near one."""
    return (log_mels - LOG_FLOOR) / 2.0


def _patches(normal: Tensor) -> Tensor:
    """``[B, T / 8, M * 8]`` of ``[B, M, T]``: the values of each latent frame, band by band."""
    batch, bands, frames = normal.shape
    split = normal.reshape(batch, bands, frames // FRAME, FRAME).transpose(1, 2)
    return split.reshape(batch, frames // FRAME, bands * FRAME)
