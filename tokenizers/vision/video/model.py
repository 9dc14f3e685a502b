"""The picture autoencoder inflated over time: a causal 3-D convolutional network that codes clips.

A 3x3 kernel of the picture network becomes the last slice in time of a causal 3-D kernel, whose other slices
look at earlier frames only. Those have no bias, start at zero and are all that training changes, so a clip of
one frame (nothing before it) is coded to the bit as the picture network codes it, and one set of picture
weights serves both (ERNIE 5.0 report, section 2.2; slices placed as in InfinityStar).

No norm or resampling crosses time and every frame is coded: a frame's codes depend on it and on a bounded
number of frames before it. Frames run one by one, whatever the size of the chunks they come in, so chunks
give the codes of the whole clip to the bit.

Shape legend: B clips, T frames, H = 8 h and W = 8 w pixels, h x w cells, C = trunk width, d = bits a cell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.tokenizers.vision.model import STRIDE, ResidualBlock, VisionModel

# What the inflated layers of a stream have read of its last frames, newest first: name of the layer to
# tensors [B, c, y, x]. An empty one is a stream that has not begun.
Memory = dict[str, tuple[Tensor, ...]]
# Adds what a layer sees of earlier frames: (name, its input, its output for this frame) to the output.
_AddPast = Callable[[str, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TemporalConfig:
    """Sizes of the earlier slices: the side of the kernel for the frame before, for the one before that, …"""

    kernels: tuple[int, ...] = (3, 1)

    def __post_init__(self) -> None:
        if not self.kernels or any(size < 1 or size % 2 == 0 for size in self.kernels):
            raise ValueError(f"kernels {self.kernels} are not odd sizes, one for each earlier frame")

    def as_json(self) -> dict[str, list[int]]:
        return {name: list(value) for name, value in asdict(self).items()}


class PastSlices(nn.Module):
    """The slices of one causal 3-D kernel that look at earlier frames; zero at first."""

    def __init__(self, channels: int, out_channels: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        self.slices = nn.ModuleList(
            nn.Conv2d(channels, out_channels, size, padding=size // 2, bias=False) for size in kernels
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class VideoModel(nn.Module):
    """A picture network, frozen, and the slices that inflate the first convolution of its residual blocks.

    Blocks at strides 4 and 8 (16x16 and 8x8 cells of a 64x64 frame) are inflated, in encoder and decoder.

    Attributes:
        image: the picture network; no parameter of it changes.
        past: the earlier slices by the name of their block; ``past.state_dict()`` is the video weights.
    """

    def __init__(self, image: VisionModel, config: TemporalConfig | None = None) -> None:
        super().__init__()
        self.config = config or TemporalConfig()
        self.image = image.requires_grad_(False)
        widths = (image.config.width, image.config.trunk_width)
        self.past = nn.ModuleDict(
            {
                f"{part}_{index}": PastSlices(
                    layer.first.in_channels, layer.first.out_channels, self.config.kernels
                )
                for part in ("encoder", "decoder")
                for index, layer in enumerate(getattr(image, part))
                if isinstance(layer, ResidualBlock) and layer.first.in_channels in widths
            }
        )

    def encode_frame(self, frames: Tensor, memory: Memory) -> tuple[Tensor, Tensor, Memory]:
        """The next frame of B streams, ``[B, 3, H, W]`` in [0, 1], after what ``memory`` holds of them.

        Returns:
            Trunk ``[B, C, h, w]``, latent ``[B, d, h, w]`` (as
            :meth:`~ernie5.tokenizers.vision.model.VisionModel.encode`) and the memory for the frame after.
        """
        after: Memory = {}
        trunk, latent = self._encode(frames, self._remembering(memory, after))
        return trunk, latent, after

    def decode_frame(self, quantised: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Sums of scales of the next frame ``[B, bits, h, w]`` to ``[B, 3, H, W]``, and the new memory."""
        after: Memory = {}
        return self._decode(quantised, self._remembering(memory, after)), after

    def encode_clips(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """Whole clips ``[B, T, 3, H, W]`` to trunk ``[B, T, C, h, w]`` and latent ``[B, T, d, h, w]``.

        For training; equal to :meth:`encode_frame` frame by frame up to rounding.
        """
        batch, frames = clips.shape[:2]
        trunk, latent = self._encode(clips.flatten(0, 1), self._shifting(batch))
        return trunk.unflatten(0, (batch, frames)), latent.unflatten(0, (batch, frames))

    def decode_clips(self, quantised: Tensor) -> Tensor:
        """Sums of scales of whole clips ``[B, T, bits, h, w]`` to ``[B, T, 3, H, W]``, for training."""
        batch, frames = quantised.shape[:2]
        return self._decode(quantised.flatten(0, 1), self._shifting(batch)).unflatten(0, (batch, frames))

    def _encode(self, frames: Tensor, add_past: _AddPast) -> tuple[Tensor, Tensor]:
        if frames.shape[-1] % STRIDE or frames.shape[-2] % STRIDE:
            raise ValueError(f"frames of shape {tuple(frames.shape)} are not multiples of {STRIDE} pixels")
        trunk = self._run("encoder", frames * 2 - 1, add_past)
        return trunk, self.image.to_latent(F.silu(trunk))

    def _decode(self, quantised: Tensor, add_past: _AddPast) -> Tensor:
        bits = quantised.shape[1]
        channels = F.pad(quantised * bits**0.5, (0, 0, 0, 0, 0, self.image.config.bits - bits))
        return (self._run("decoder", self.image.from_latent(channels), add_past) + 1) / 2

    def _run(self, part: str, x: Tensor, add_past: _AddPast) -> Tensor:
        for index, layer in enumerate(getattr(self.image, part)):
            name = f"{part}_{index}"
            if name not in self.past:
                x = layer(x)
                continue
            seen = F.silu(layer.norm(x))
            x = x + layer.second(F.silu(add_past(name, seen, layer.first(seen))))
        return x

    def _slices(self, name: str) -> nn.ModuleList:
        past = self.past[name]
        assert isinstance(past, PastSlices)
        return past.slices

    def _remembering(self, memory: Memory, after: Memory) -> _AddPast:
        """Frame by frame: ``after`` receives what ``memory`` holds and this frame."""

        def add_past(name: str, seen: Tensor, out: Tensor) -> Tensor:
            before = memory.get(name, ())
            after[name] = (seen, *before)[: len(self.config.kernels)]
            for earlier, layer in zip(before, self._slices(name)):
                out = out + layer(earlier)
            return out

        return add_past

    def _shifting(self, batch: int) -> _AddPast:
        """Whole clips at once, flattened to ``[B T, …]``: earlier frames are the clip shifted."""

        def add_past(name: str, seen: Tensor, out: Tensor) -> Tensor:
            clips = seen.unflatten(0, (batch, -1))
            frames = clips.shape[1]
            for distance, layer in enumerate(self._slices(name), 1):
                if distance >= frames:
                    break
                earlier = layer(clips[:, :-distance].flatten(0, 1)).unflatten(0, (batch, -1))
                out = out + F.pad(earlier, (0, 0) * 3 + (distance, 0)).flatten(0, 1)
            return out

        return add_past


def count_video_parameters(model: VideoModel) -> int:
    """Parameters of the earlier slices alone."""
    return sum(parameter.numel() for parameter in model.past.parameters())
