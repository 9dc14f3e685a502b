"""Causal convolutional codec over log-mel frames, 12.5 latent frames a second.

A latent frame stands for a patch of 8 mel frames. It is the sum of the patch's principal components and of
a convolutional encoder's output, which sees the past too: two mel frames folded into one step of 160 values
(50 steps a second), then two strided stages. The residual quantiser takes 8 codes a frame, and the decoder
mirrors the encoder, linear part and all. The linear parts make the codec useful from its first step on; the
convolutions learn what they miss. Nothing looks ahead, so that a stream can be encoded and decoded frame by
frame. The convolutions follow SoundStream (Zeghidour et al., 2021) with mel frames in place of samples:
minutes on a processor's core train it, where a waveform codec stays unintelligible.

Shapes: ``B`` clips, ``M = BANDS``, ``T`` mel frames (a multiple of 8), ``D`` latent dimensions, ``S`` steps
of a layer, ``C`` channels. Inside, time comes before channels: a convolution is then a matrix product of the
taps side by side, which a processor's core computes a third faster than the library's convolution of
sequences this short. The parameters keep the shapes of the library's modules.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ernie5.tokenizers.audio.mel import BANDS, LOG_FLOOR
from ernie5.tokenizers.audio.quantiser import Quantised, ResidualQuantiser

FOLD = 2
FRAME = 8  # mel frames in a latent frame
# Beginnings that the search for codes keeps: 16 take as long as the encoder, and leave a fifth less error.
SEARCH_WIDTH = 16


class CausalConv(nn.Module):
    """Convolution ``[B, S, C]`` that sees no later step; ``ceil(S / stride)`` steps come out."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride, dilation=dilation)
        self.kernel, self.stride, self.dilation = kernel, stride, dilation
        self.before = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, self.before, 0))
        steps = -(-x.shape[1] // self.stride)
        last = (steps - 1) * self.stride + 1
        taps = [
            padded[:, tap * self.dilation : tap * self.dilation + last : self.stride]
            for tap in range(self.kernel)
        ]
        weight = self.conv.weight.transpose(1, 2).flatten(1)
        return F.linear(torch.cat(taps, dim=-1), weight, self.conv.bias)


class CausalUpsample(nn.Module):
    """Transposed convolution ``[B, S, C]``, kernel twice the stride, its tail of later influence cut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(inputs, outputs, 2 * stride, stride)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, inputs = x.shape
        # Step t reaches the outputs of t with the kernel's first half and those of t + 1 with its second.
        both = torch.cat([x, F.pad(x, (0, 0, 1, 0))[:, :-1]], dim=-1)
        halves = self.conv.weight.view(inputs, -1, 2, self.stride)
        weight = halves.permute(3, 1, 2, 0).reshape(-1, 2 * inputs)
        assert self.conv.bias is not None
        return F.linear(both, weight, self.conv.bias.repeat(self.stride)).view(batch, steps * self.stride, -1)


class Pointwise(nn.Conv1d):
    """Convolution of one step, ``[B, S, C]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[..., 0], self.bias)


class ResidualBlock(nn.Module):
    """Width-preserving block: ELU, dilated convolution of three, ELU, pointwise convolution, gain."""

    def __init__(self, width: int, dilation: int = 1) -> None:
        super().__init__()
        self.spread = CausalConv(width, width, 3, dilation=dilation)
        self.mix = Pointwise(width, width)
        self.gain = nn.Parameter(torch.full((width, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain[:, 0] * self.mix(F.elu(self.spread(F.elu(x))))


class MelCodec(nn.Module):
    """Log-mel frames to codes and back."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """Widths at 50, 25 and 12.5 steps a second; ``levels`` codebooks of ``codebook_size`` codes."""

        widths: tuple[int, int, int] = (128, 192, 352)
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
        last_encoder = Pointwise(high, config.latent)
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

    @property
    def encoder_context(self) -> int:
        """Earlier latent frames that one depends on."""
        return _context(self.encoder, FRAME // FOLD)

    @property
    def decoder_context(self) -> int:
        """Earlier latent frames that a frame's log-mels depend on."""
        return _context(self.decoder, 1)

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
        folded = normal.reshape(batch, bands, frames // FOLD, FOLD).transpose(1, 2).flatten(2)
        return (self.analysis(_patches(normal)) + self.encoder(folded)).transpose(1, 2)

    def from_latent(self, latent: Tensor) -> Tensor:
        """Log-mel ``[B, M, T]`` of ``[B, D, T / 8]``; may lie below the floor."""
        batch, _, steps = latent.shape
        latent = latent.transpose(1, 2)
        folded = self.decoder(latent).view(batch, steps * FRAME // FOLD, BANDS, FOLD)
        learned = folded.transpose(1, 2).reshape(batch, BANDS, steps * FRAME)
        patches = self.synthesis(latent).view(batch, steps, BANDS, FRAME)
        linear = patches.transpose(1, 2).reshape(batch, BANDS, steps * FRAME)
        return (linear + learned) * 2.0 + LOG_FLOOR

    def codes_of(self, latent: Tensor, levels: int | None = None) -> Tensor:
        """Codes, int64 ``[B, T / 8, levels]``, of a latent ``[B, D, T / 8]``, searched for."""
        return self.quantiser.encode(latent, levels, SEARCH_WIDTH)

    def encode(self, log_mels: Tensor, levels: int | None = None) -> Tensor:
        """Codes, int64 ``[B, T / 8, levels]``, of log-mels ``[B, M, T]``."""
        return self.codes_of(self.to_latent(log_mels), levels)

    def decode(self, codes: Tensor) -> Tensor:
        """Log-mels ``[B, M, T]`` of codes ``[B, T / 8, levels]``."""
        return self.floored(self.from_latent(self.quantiser.decode(codes)))

    @staticmethod
    def floored(log_mels: Tensor) -> Tensor:
        """Log-mels as sounds can have them: none below the floor."""
        return log_mels.clamp(min=LOG_FLOOR)

    def forward(self, log_mels: Tensor, levels: int | Tensor) -> tuple[Tensor, Tensor, Quantised]:
        """Training pass: reconstructed log-mels ``[B, M, T]``, latent ``[B, D, T / 8]``, its codes.

        ``levels`` is a number for all clips, or an int64 ``[B]``.
        """
        latent = self.to_latent(log_mels)
        quantised = self.quantiser(latent, levels)
        return self.from_latent(quantised.vectors), latent, quantised


def _context(layers: nn.Sequential, steps: int) -> int:
    """Latent frames before a frame that reach into its last step, where ``steps`` make one at the start."""
    reach = Fraction()
    for layer in layers:
        if isinstance(layer, ResidualBlock):
            reach += Fraction(layer.spread.before, steps)
        elif isinstance(layer, CausalConv):
            reach += Fraction(layer.before, steps)
            steps //= layer.stride
        elif isinstance(layer, CausalUpsample):
            reach += Fraction(1, steps)
            steps *= layer.stride
    return ceil(reach)


def _normal(log_mels: Tensor) -> Tensor:
    """Log-mels with silence at zero and a spread near one."""
    return (log_mels - LOG_FLOOR) / 2.0


def _patches(normal: Tensor) -> Tensor:
    """``[B, T / 8, M * 8]`` of ``[B, M, T]``: the values of each latent frame, band by band."""
    batch, bands, frames = normal.shape
    split = normal.reshape(batch, bands, frames // FRAME, FRAME).transpose(1, 2)
    return split.reshape(batch, frames // FRAME, bands * FRAME)
