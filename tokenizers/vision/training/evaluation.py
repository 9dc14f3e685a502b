"""Held-out figures of a picture tokenizer's model, computed through the integer codes as in use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ernie5.kernels.scales import accumulate, quantise
from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie5.protocol.grids import schedule_for
from ernie5.tokenizers.vision.model import VisionModel
from ernie5.tokenizers.vision.preprocessing import fit_to_canvas, open_image
from ernie5.tokenizers.vision.training.data import DIGIT_GRID, PICTURE_GRID, TrainingData, canvases_of
from ernie5.tokenizers.vision.training.judge import judge_accuracy
from ernie5.tokenizers.vision.training.metrics import bit_entropies, psnr, ssim


@torch.no_grad()
def reconstruct(
    model: VisionModel,
    pictures: Tensor,
    grid: tuple[int, int],
    upto: int | None = None,
    bits: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Code and decode float ``[n, 3, H, W]``. Returns pictures and codes.

    Args:
        upto: from the first so many scales; all if None.
        bits: one of the model's bit widths; the largest if None.
    """
    bits = bits or model.config.bits
    schedule = schedule_for(grid)
    outputs, codes = [], []
    for part in pictures.split(64):
        coded = [scale & (1 << bits) - 1 for scale in quantise(model.encode(part)[1], schedule)]
        outputs.append(model.decode(accumulate(coded, schedule, bits, upto)).clamp(0, 1))
        codes.append(coded)
    return torch.cat(outputs), [torch.cat(scale) for scale in zip(*codes)]


def evaluate(
    model: VisionModel, data: TrainingData, judge: nn.Module | None = None, limit: int | None = None
) -> dict[str, object]:
    """Held-out figures of every bit width, by its number of bits: see :func:`_figures`."""
    model.eval()
    return {str(bits): _figures(model, bits, data, judge, limit) for bits in model.config.bit_widths}


def evaluate_folder(model: VisionModel, folder: Path) -> dict[str, object]:
    """PSNR and SSIM of the picture files below ``folder``, each bit width, on canvases of 64 x 64 pixels.

    Files that are no pictures are counted as ``refused``; equal canvases count once.

    Raises:
        InvalidInputError: there is no picture.
    """
    found: dict[bytes, np.ndarray] = {}
    refused = 0
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            canvas, _ = fit_to_canvas(open_image(file.read_bytes()), PICTURE_GRID)
        except ErnieMultiError:
            refused += 1
            continue
        found[canvas.tobytes()] = canvas
    if not found:
        raise InvalidInputError(
            f"{folder} holds no picture ({refused} files of other kinds)", param="pictures"
        )
    pictures = torch.from_numpy(np.stack(list(found.values()))).permute(0, 3, 1, 2).float() / 255
    figures: dict[str, object] = {"pictures": len(pictures), "refused": refused}
    for bits in model.config.bit_widths:
        decoded, _ = reconstruct(model, pictures, PICTURE_GRID, bits=bits)
        figures[str(bits)] = {
            "psnr": float(psnr(decoded, pictures).mean()),
            "ssim": float(ssim(decoded, pictures).mean()),
        }
    return figures


def _figures(
    model: VisionModel, bits: int, data: TrainingData, judge: nn.Module | None, limit: int | None
) -> dict[str, object]:
    """PSNR, SSIM and bit balance on held-out pictures (``limit`` of them), digits as the judge reads them."""
    chosen = np.linspace(
        0, len(data.held_out) - 1, min(limit or len(data.held_out), len(data.held_out))
    ).astype(int)
    pictures = torch.from_numpy(data.held_out[chosen]).float() / 255
    decoded, codes = reconstruct(model, pictures, PICTURE_GRID, bits=bits)
    quality, similarity = psnr(decoded, pictures), ssim(decoded, pictures)
    source = torch.from_numpy(data.held_out_source[chosen])
    schedule = schedule_for(PICTURE_GRID)
    figures: dict[str, object] = {
        "pictures": len(pictures),
        "bits_per_pixel": bits * sum(h * w for h, w in schedule) / pictures[0, 0].numel(),
        "psnr": float(quality.mean()),
        "ssim": float(similarity.mean()),
        "psnr_by_source": {
            name: float(quality[source == index].mean())
            for index, name in enumerate(data.sources)
            if bool((source == index).any())
        },
        "bit_balance_by_scale": [float(bit_entropies(scale, bits).mean()) for scale in codes],
        "balanced_bits_by_scale": [
            float((bit_entropies(scale, bits) > 0.9).double().mean()) for scale in codes
        ],
    }
    if limit is None:
        figures["psnr_by_scales_kept"] = [
            float(psnr(reconstruct(model, pictures, PICTURE_GRID, upto, bits)[0], pictures).mean())
            for upto in range(1, len(schedule) + 1)
        ]
        mean = torch.from_numpy(data.pictures).float().mean(0) / 255
        figures["psnr_of_mean_picture"] = float(psnr(mean.expand_as(pictures), pictures).mean())
    if judge is not None:
        figures |= _digit_figures(model, bits, data, judge, limit)
    return figures


def _digit_figures(
    model: VisionModel, bits: int, data: TrainingData, judge: nn.Module, limit: int | None
) -> dict[str, object]:
    count = len(data.held_out_digits)
    chosen = np.linspace(0, count - 1, min(limit or count, count)).astype(int)
    digits, labels = data.held_out_digits[chosen], data.held_out_labels[chosen]
    canvases = torch.from_numpy(canvases_of(digits, DIGIT_GRID)).float() / 255
    decoded, codes = reconstruct(model, canvases, DIGIT_GRID, bits=bits)
    original = judge_accuracy(judge, canvases[:, :, 2:-2, 2:-2].mean(1), labels)
    read = judge_accuracy(judge, decoded[:, :, 2:-2, 2:-2].mean(1), labels)
    return {
        "digits": len(digits),
        "digit_psnr": float(psnr(decoded, canvases).mean()),
        "digit_judge_original": original,
        "digit_judge_decoded": read,
        "digit_judge_ratio": read / max(original, 1e-9),
        "digit_bit_balance_by_scale": [float(bit_entropies(scale, bits).mean()) for scale in codes],
    }


def write_sample_grid(model: VisionModel, data: TrainingData, path: Path, columns: int = 16) -> None:
    """Write a PNG: held-out pictures; from 1, 2, … and all scales at the smallest bit width; whole at the
    others; digits before and after.
    """
    low, *others = model.config.bit_widths
    chosen = np.linspace(0, len(data.held_out) - 1, columns).astype(int)
    pictures = torch.from_numpy(data.held_out[chosen]).float() / 255
    rows = [pictures]
    for upto in range(1, len(schedule_for(PICTURE_GRID)) + 1):
        rows.append(reconstruct(model, pictures, PICTURE_GRID, upto, low)[0])
    rows += [reconstruct(model, pictures, PICTURE_GRID, bits=bits)[0] for bits in others]
    examples = data.held_out_digits[np.linspace(0, len(data.held_out_digits) - 1, 2 * columns).astype(int)]
    digits = torch.from_numpy(canvases_of(examples, DIGIT_GRID)).float() / 255
    strips = [torch.cat(list(row), 2) for row in rows]
    strips += [
        torch.cat(list(row), 2) for row in (digits, reconstruct(model, digits, DIGIT_GRID, bits=low)[0])
    ]
    image = (torch.cat(strips, 1).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).resize(
        (image.shape[1] * 3 // 2, image.shape[0] * 3 // 2), Image.Resampling.NEAREST
    ).save(path)
