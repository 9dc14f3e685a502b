"""Feed-forward vocoder: log-mel to waveform by one inverse Fourier transform.

A causal convolution stack predicts magnitude corrections and phases of a short-time spectrum
(iSTFT head, Vocos, Siuzdak 2023). The magnitude starts from the pseudo-inverse of the mel filters and the
phase from each frequency's own advance a hop, so that the network learns small corrections only.

Shapes: ``B`` clips, ``M = BANDS``, ``T`` mel frames, ``F = FFT // 2 + 1`` frequencies.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ernie5.tokenizers.audio.codec import CausalConv, Pointwise, ResidualBlock
from ernie5.tokenizers.audio.mel import BANDS, FFT, FLOOR, HOP, LOG_FLOOR, inverse_filterbank, istft

# After this many frames every frequency's phase advance is a multiple of a full turn.
PHASE_PERIOD = FFT // 32
assert HOP * PHASE_PERIOD % FFT == 0


class Vocoder(nn.Module):
    """Log-mels ``[B, M, T]`` to samples ``[B, T * HOP]``."""

    @dataclass(frozen=True, slots=True)
    class Config:
        width: int = 160
        blocks: int = 4

        @classmethod
        def from_json(cls, values: dict[str, Any]) -> Vocoder.Config:
            return cls(**values)

        def as_json(self) -> dict[str, Any]:
            return asdict(self)

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config = config or Vocoder.Config()
        self.stem = CausalConv(BANDS, config.width, 5)
        self.blocks = nn.Sequential(
            *(ResidualBlock(config.width, 2 ** (i % 2)) for i in range(config.blocks))
        )
        self.head = Pointwise(config.width, 2 * (FFT // 2 + 1))
        nn.init.normal_(self.head.weight, std=0.01)

    @property
    def context(self) -> int:
        """Earlier mel frames that a frame's spectrum depends on."""
        return 4 + sum(2 * 2 ** (i % 2) for i in range(self.config.blocks))

    def spectrum(self, log_mels: Tensor) -> Tensor:
        """Complex short-time spectrum ``[B, F, T]``."""
        hidden = self.blocks(self.stem(((log_mels - LOG_FLOOR) / 2.0).transpose(1, 2)))
        correction, turn = self.head(F.elu(hidden)).transpose(1, 2).chunk(2, dim=1)
        base = (inverse_filterbank().to(log_mels.device) @ (log_mels.exp() - FLOOR)).clamp(min=1e-4)
        frames = torch.arange(log_mels.shape[-1], device=log_mels.device)
        frequencies = torch.arange(FFT // 2 + 1, device=log_mels.device)[:, None]
        # In integers and modulo a turn, so that late frames lose no precision.
        advance = (frequencies * HOP * frames % FFT).float() * (2.0 * torch.pi / FFT)
        return torch.polar(base * torch.exp(correction.clamp(-4.0, 4.0)), 3.0 * torch.pi * turn + advance)

    def forward(self, log_mels: Tensor) -> Tensor:
        return istft(F.pad(self.spectrum(log_mels), (0, 1)))

    @torch.no_grad()
    def synthesise(self, log_mels: Tensor, chunk: int = 3200) -> Tensor:
        """As :meth:`forward`, in chunks of ``chunk`` frames, so that memory does not grow with length.

        ``chunk`` is a multiple of ``PHASE_PERIOD``. Each chunk is computed with the frames before and after
        it that reach into it, and agrees with the whole to rounding.
        """
        if chunk % PHASE_PERIOD:
            raise ValueError(f"chunk {chunk} is not a multiple of {PHASE_PERIOD} frames")
        frames = log_mels.shape[-1]
        # The windows of neighbours overlap too: WINDOW // HOP frames on either side.
        before = -(-(self.context + 4) // PHASE_PERIOD) * PHASE_PERIOD
        pieces = []
        for start in range(0, frames, chunk):
            first, end = max(0, start - before), min(frames, start + chunk)
            samples = self.forward(log_mels[..., first : min(frames, end + 4)])
            pieces.append(samples[..., (start - first) * HOP : (end - first) * HOP])
        return torch.cat(pieces, dim=-1)
