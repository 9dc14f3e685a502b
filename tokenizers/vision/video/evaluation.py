"""Held-out figures of the video tokenizer beside the picture tokenizer frame by frame, at equal bits.

Both code every frame with the same number of bits through the integer codes as in use; what differs is that
the video tokenizer has seen the frames before.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ernie5.kernels.scales import accumulate, quantise
from ernie5.protocol.grids import schedule_for
from ernie5.tokenizers.vision.model import STRIDE
from ernie5.tokenizers.vision.training.metrics import psnr, ssim
from ernie5.tokenizers.vision.video.data import VideoData, held_out_clips
from ernie5.tokenizers.vision.video.model import Memory, VideoModel

FRAMES = 12


@torch.no_grad()
def reconstruct_clips(model: VideoModel, clips: Tensor, bits: int, *, past: bool = True) -> Tensor:
    """Code and decode float ``[n, T, 3, H, W]`` at a bit width; ``past`` false forgets every frame."""
    schedule = schedule_for((clips.shape[3] // STRIDE, clips.shape[4] // STRIDE))
    encoded: Memory = {}
    decoded: Memory = {}
    drawn = []
    for frames in clips.unbind(1):
        _, latent, encoded = model.encode_frame(frames, encoded if past else {})
        codes = [scale & (1 << bits) - 1 for scale in quantise(latent, schedule)]
        picture, decoded = model.decode_frame(accumulate(codes, schedule, bits), decoded if past else {})
        drawn.append(picture.clamp(0, 1))
    return torch.stack(drawn, 1)


def evaluate_video(model: VideoModel, data: VideoData, frames: int = FRAMES) -> dict[str, object]:
    """PSNR and SSIM of both tokenizers by bit width, kind of clip and frame; see :func:`held_out_clips`."""
    model.eval()
    widths = model.image.config.bit_widths
    kinds = held_out_clips(data, frames)
    return {
        "frames": frames,
        "clips": {kind: len(clips) for kind, clips in kinds.items()},
        "bit_widths": {
            str(bits): {kind: compare(model, clips, bits) for kind, clips in kinds.items()} for bits in widths
        },
    }


def compare(model: VideoModel, clips: Tensor, bits: int) -> dict[str, object]:
    """Decibels by frame, gain over the picture tokenizer with its standard error over clips, and SSIM.

    The gain is of frames after the first, which both code alike.
    """
    video, image = (reconstruct_clips(model, clips, bits, past=past) for past in (True, False))
    shape = clips.shape[:2]
    quality, plain = (psnr(drawn.flatten(0, 1), clips.flatten(0, 1)).view(shape) for drawn in (video, image))
    gain = (quality - plain)[:, 1:].mean(1)
    later = [part[:, 1:].flatten(0, 1) for part in (video, image, clips)]
    return {
        "psnr_image_by_frame": _rounded(plain.mean(0)),
        "psnr_video_by_frame": _rounded(quality.mean(0)),
        "gain_db": round(float(gain.mean()), 3),
        "gain_standard_error": round(float(gain.std() / max(1, len(gain)) ** 0.5), 3),
        "clips_gained": int((gain > 0).sum()),
        "worst_clip_db": round(float(gain.min()), 3),
        "ssim_image": round(float(ssim(later[1], later[2]).mean()), 4),
        "ssim_video": round(float(ssim(later[0], later[2]).mean()), 4),
    }


def write_strips(model: VideoModel, data: VideoData, path: Path, clips: int = 6, frames: int = 8) -> None:
    """Write a PNG: for some held-out clips their frames, those of the picture tokenizer, of the video one.

    At the smallest bit width.
    """
    kinds = held_out_clips(data, frames)
    half = (clips + 1) // 2
    chosen = torch.cat([kinds["animated"][:half], kinds["moving"][: clips - half]])
    bits = model.image.config.bit_widths[0]
    rows = [
        torch.cat([clip[place] for clip in (chosen, image, video)], 2)
        for image, video in [
            (
                reconstruct_clips(model, chosen, bits, past=False),
                reconstruct_clips(model, chosen, bits),
            )
        ]
        for place in range(len(chosen))
    ]
    strip = torch.cat([torch.cat(list(row), 2) for row in rows], 1)
    pixels = (strip.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.ascontiguousarray(pixels)).save(path)


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 3) for value in values]
