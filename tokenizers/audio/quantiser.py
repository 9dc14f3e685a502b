"""Residual vector quantiser with codebooks kept by moving averages.

SoundStream (Zeghidour et al., 2021), section III-C: each level quantises what the levels before it
left, and training draws how many levels are used, so that one model serves every rate. Codebooks follow the
moving averages of their vectors (van den Oord et al., 2017, appendix A.1), and codes that have fallen
out of use restart at vectors of the current batch.

Shapes: ``B`` clips, ``D`` dimensions, ``T`` frames, ``Q`` levels, ``K`` codes, ``V = B * T`` vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_RESTART_EVERY = 10
_RESTART_BELOW = 0.25  # of the mean use
_SEARCHED_AT_ONCE = 512  # vectors, so that the search's memory is bounded


@dataclass(frozen=True, slots=True)
class Quantised:
    """Result of a training pass.

    Attributes:
        vectors: ``[B, D, T]``, with the gradient passed straight through to the input.
        codes: int64 ``[B, T, levels]``.
        commitment: scalar, mean squared distance between residuals and their codes.
        first: ``[B, D, T]``, the first level's codes alone, the gradient passed straight through.
    """

    vectors: Tensor
    codes: Tensor
    commitment: Tensor
    first: Tensor


class ResidualQuantiser(nn.Module):
    """``levels`` codebooks of ``size`` codes of ``dimension`` values."""

    codebooks: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, levels: int, size: int, dimension: int) -> None:
        super().__init__()
        self.levels, self.size, self.dimension = levels, size, dimension
        self.register_buffer("codebooks", torch.randn(levels, size, dimension))
        # Averages that only training needs; the shipped file leaves them out.
        self.register_buffer("counts", torch.ones(levels, size))
        self.register_buffer("sums", self.codebooks.clone())

    def encode(self, vectors: Tensor, levels: int | None = None, width: int = 1) -> Tensor:
        """Codes, int64 ``[B, T, levels]``, of ``vectors`` ``[B, D, T]``.

        Args:
            vectors: what to code.
            levels: how many of the levels; all by default.
            width: how many best beginnings each level keeps for the next to go on from. With one, each level
                takes the code nearest to what is left, and fewer levels give a prefix; with more, the sum of
                all levels comes closer to the vectors.
        """
        used = self.levels if levels is None else levels
        residual = vectors.transpose(1, 2)
        if width > 1:
            found = [
                self._searched(part, used, width) for part in residual.flatten(0, 1).split(_SEARCHED_AT_ONCE)
            ]
            return torch.cat(found).view(*residual.shape[:2], used)
        codes = []
        for level in range(used):
            chosen = self._nearest(residual, level)
            codes.append(chosen)
            residual = residual - self.codebooks[level][chosen]
        return torch.stack(codes, dim=-1)

    def _searched(self, vectors: Tensor, levels: int, width: int) -> Tensor:
        """Codes ``[V, levels]`` of ``vectors`` ``[V, D]`` by beam search."""
        residual = vectors[:, None]
        codes = torch.zeros(len(vectors), 1, 0, dtype=torch.int64, device=vectors.device)
        for level in range(levels):
            codebook = self.codebooks[level]
            distance = residual.pow(2).sum(-1, keepdim=True) - 2.0 * (residual @ codebook.T)
            distance = (distance + codebook.pow(2).sum(1)).flatten(1)
            kept = min(width, distance.shape[1]) if level < levels - 1 else 1
            best = distance.topk(kept, dim=1, largest=False).indices
            beginning, code = best // self.size, best % self.size
            before = codes.gather(1, beginning[..., None].expand(-1, -1, level))
            codes = torch.cat([before, code[..., None]], dim=-1)
            left = residual.gather(1, beginning[..., None].expand(-1, -1, self.dimension))
            residual = left - codebook[code]
        return codes[:, 0]

    def decode(self, codes: Tensor) -> Tensor:
        """Vectors ``[B, D, T]`` of ``codes`` ``[B, T, levels]``; fewer levels than trained are allowed."""
        total = sum(self.codebooks[level][codes[..., level]] for level in range(codes.shape[-1]))
        assert isinstance(total, Tensor)
        return total.transpose(1, 2)

    def forward(self, vectors: Tensor, levels: int | Tensor) -> Quantised:
        """Quantise without touching the codebooks.

        Args:
            vectors: ``[B, D, T]``.
            levels: how many of the first levels count; an int64 ``[B]`` says it for each clip, and the codes
                are then those of all levels.
        """
        residual = vectors.transpose(1, 2)
        used = self.levels if isinstance(levels, Tensor) else levels
        total = torch.zeros_like(residual)
        commitment = vectors.new_zeros(())
        codes = []
        for level in range(used):
            chosen = self._nearest(residual.detach(), level)
            quantised = self.codebooks[level][chosen]
            commitment = commitment + F.mse_loss(residual, quantised) / used
            codes.append(chosen)
            counted = quantised if isinstance(levels, int) else quantised * (levels > level)[:, None, None]
            total, residual = total + counted, residual - quantised
        first = self.codebooks[0][codes[0]]
        through = [vectors + (part.transpose(1, 2) - vectors).detach() for part in (total, first)]
        return Quantised(through[0], torch.stack(codes, dim=-1), commitment, through[1])

    @torch.no_grad()
    def start(self, vectors: Tensor, generator: torch.Generator) -> None:
        """Place every codebook on vectors ``[B, D, T]`` of a first batch.

        The counts start at the mean use: started at one they would hide unused codes for many steps.
        """
        residual = vectors.transpose(1, 2).reshape(-1, self.dimension)
        for level in range(self.levels):
            drawn = torch.randint(len(residual), (self.size,), generator=generator)
            noise = torch.randn(self.size, self.dimension, generator=generator)
            self._set(level, slice(None), residual[drawn] + 0.01 * residual.std() * noise, len(residual))
            residual = residual - self.codebooks[level][self._nearest(residual, level)]

    @torch.no_grad()
    def update(
        self,
        vectors: Tensor,
        codes: Tensor,
        decay: float,
        generator: torch.Generator | None = None,
        step: int = 0,
    ) -> int:
        """Move the codebooks towards the vectors they won; returns how many unused codes were restarted.

        Args:
            vectors: ``[B, D, T]``, the input of :meth:`forward`.
            codes: ``[B, T, levels]``, its output.
            decay: of the moving averages.
            generator: draws the vectors that unused codes restart from, every tenth ``step``; None
                restarts none.
        """
        residual = vectors.transpose(1, 2).reshape(-1, self.dimension)
        restarted = 0
        for level in range(codes.shape[-1]):
            chosen = codes[..., level].reshape(-1)
            won = self.codebooks[level][chosen]
            self.counts[level].lerp_(torch.bincount(chosen, minlength=self.size).float(), 1 - decay)
            self.sums[level].mul_(decay).index_add_(0, chosen, residual, alpha=1 - decay)
            self.codebooks[level] = self.sums[level] / (self.counts[level, :, None] + 1e-5)
            if generator is not None and step % _RESTART_EVERY == 0:
                unused = self.counts[level] < _RESTART_BELOW * len(residual) / self.size
                number = int(unused.sum())
                if number:
                    drawn = torch.randint(len(residual), (number,), generator=generator)
                    self._set(level, unused, residual[drawn], len(residual))
                    restarted += number
            residual = residual - won
        return restarted

    def _set(self, level: int, where: slice | Tensor, codes: Tensor, vectors: int) -> None:
        use = vectors / self.size
        self.codebooks[level][where] = codes
        self.counts[level][where] = use
        self.sums[level][where] = codes * use

    def _nearest(self, residual: Tensor, level: int) -> Tensor:
        codebook = self.codebooks[level]
        # |r - c|^2 without |r|^2, which is the same for every code.
        return (codebook.pow(2).sum(dim=1) - 2.0 * (residual @ codebook.T)).argmin(dim=-1)
