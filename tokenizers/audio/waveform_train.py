"""Training recipe of the waveform codec, for a GPU: spectral losses in several resolutions, then adversaries.

    ernie-multi tokenizer train audio --kind waveform --device cuda --data CLIPS --out RUN

Resumable like the mel codec's recipe. ``RUN`` receives ``waveform.safetensors``, the curve, and figures and
spectrograms on held-out clips. Not run at length by the authors, who had no GPU for it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ernie5.tokenizers.audio.clips import FRAME_SAMPLES, Clips, waveform_batch
from ernie5.tokenizers.audio.losses import spectral_loss
from ernie5.tokenizers.audio.mel import log_mel
from ernie5.tokenizers.audio.storage import WAVEFORM_FILE, publish
from ernie5.tokenizers.audio.training_state import load_state, save_state
from ernie5.tokenizers.audio.waveform import (
    SpectralDiscriminator,
    WaveformCodec,
    adversarial_loss,
    discriminator_loss,
)


@dataclass(frozen=True, slots=True)
class WaveformRecipe:
    """Sizes of a run; ``adversarial_from`` is the step from which the discriminators take part."""

    steps: int = 200_000
    minutes: float = 0.0
    learning_rate: float = 3e-4
    batch: int = 32
    samples: int = 12 * FRAME_SAMPLES
    digit_share: float = 0.2
    adversarial_from: int = 20_000
    adversarial_weight: float = 1.0
    matching_weight: float = 2.0
    spectral_weight: float = 2.0
    waveform_weight: float = 0.1
    commitment_weight: float = 0.25
    save_every: int = 1_000
    seed: int = 0
    config: WaveformCodec.Config = field(default_factory=WaveformCodec.Config)
    discriminator_width: int = 32


class _Pair(nn.Module):
    def __init__(self, recipe: WaveformRecipe) -> None:
        super().__init__()
        self.codec = WaveformCodec(recipe.config)
        self.discriminator = SpectralDiscriminator(width=recipe.discriminator_width)


def train_waveform(
    data: Path,
    out: Path,
    recipe: WaveformRecipe,
    *,
    device: str = "cpu",
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> dict[str, Any]:
    """Train on the ``train`` split of ``data`` and publish ``out/waveform.safetensors``.

    Returns the history: steps, minutes and the curve.
    """
    out.mkdir(parents=True, exist_ok=True)
    clips = Clips.load(data)
    indices = np.flatnonzero(clips.split == "train")
    if not len(indices):
        raise ValueError(f"{data} holds no clip of the split 'train'; splits: {sorted(set(clips.split))}")
    torch.manual_seed(recipe.seed)
    pair = _Pair(recipe).to(device)
    # One optimiser for both: parameters without a gradient stay as they are.
    optimiser = torch.optim.AdamW(pair.parameters(), recipe.learning_rate, betas=(0.8, 0.99), fused=True)
    state = out / "waveform-training.safetensors"
    first = 0
    history: dict[str, Any] = {"steps": 0, "minutes": 0.0, "curve": []}
    if state.exists():
        first, history = load_state(state, pair, optimiser)
    else:
        _start_codebooks(pair.codec, clips, indices, recipe, device)
    before = history["minutes"] - time.monotonic() / 60
    for step in range(first, recipe.steps):
        spent = before + time.monotonic() / 60
        done = max(step / recipe.steps, spent / recipe.minutes if recipe.minutes else 0.0)
        if done >= 1.0:
            break
        rate = recipe.learning_rate * min(1.0, (step + 1) / 500) * (0.5 + 0.5 * math.cos(math.pi * done))
        optimiser.param_groups[0]["lr"] = rate + 1e-6
        measured = _step(pair, optimiser, clips, indices, recipe, step, device)
        history["steps"], history["minutes"] = step + 1, before + time.monotonic() / 60
        if (step + 1) % recipe.save_every == 0:
            history["curve"].append({"step": step + 1, **measured})
            save_state(state, pair, optimiser, step + 1, history)
        if on_step:
            on_step(step + 1, measured)
    save_state(state, pair, optimiser, history["steps"], history)
    publish(pair.codec, out / WAVEFORM_FILE)
    (out / "waveform-metrics.json").write_text(json.dumps(history, indent=1))
    return history


@torch.no_grad()
def _start_codebooks(
    codec: WaveformCodec, clips: Clips, indices: np.ndarray, recipe: WaveformRecipe, device: str
) -> None:
    random = np.random.default_rng((recipe.seed, 0))
    samples = waveform_batch(clips, indices, recipe.batch, recipe.samples, recipe.digit_share, random)
    latent = codec.to_latent(samples.to(device))
    # Drawn on the CPU, so that every device starts alike.
    quantiser = codec.quantiser.cpu()
    quantiser.start(latent.cpu(), torch.Generator().manual_seed(recipe.seed))
    codec.quantiser.to(device)


def _step(
    pair: _Pair,
    optimiser: torch.optim.AdamW,
    clips: Clips,
    indices: np.ndarray,
    recipe: WaveformRecipe,
    step: int,
    device: str,
) -> dict[str, float]:
    random = np.random.default_rng((recipe.seed, 1, step))
    samples = waveform_batch(clips, indices, recipe.batch, recipe.samples, recipe.digit_share, random)
    samples = samples.to(device, non_blocking=True)
    levels = torch.from_numpy(random.integers(1, recipe.config.levels + 1, recipe.batch)).to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu"):
        output, latent, quantised = pair.codec(samples, levels)
    restarts = torch.Generator(device).manual_seed(recipe.seed + step)
    pair.codec.quantiser.update(latent.detach(), quantised.codes, 0.99, restarts, step)
    adversarial = step >= recipe.adversarial_from
    measured: dict[str, float] = {}
    if adversarial:
        judged = discriminator_loss(pair.discriminator(samples), pair.discriminator(output.detach()))
        measured["discriminator"] = _apply(judged, pair, optimiser)
    spectral, distance = spectral_loss(output, samples)
    loss = (
        recipe.spectral_weight * spectral
        + recipe.waveform_weight * F.l1_loss(output, samples)
        + recipe.commitment_weight * quantised.commitment
    )
    if adversarial:
        pair.discriminator.requires_grad_(False)
        fooled, matched = adversarial_loss(pair.discriminator(samples), pair.discriminator(output))
        pair.discriminator.requires_grad_(True)
        loss = loss + recipe.adversarial_weight * fooled + recipe.matching_weight * matched
        measured |= {"fooled": fooled.item(), "matched": matched.item()}
    return {"loss": _apply(loss, pair, optimiser), "log_mel_l1": distance, **measured}


def _apply(loss: Tensor, pair: _Pair, optimiser: torch.optim.AdamW) -> float:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(pair.parameters(), 1.0)
    optimiser.step()
    return loss.item()


@torch.no_grad()
def held_out_distance(codec: WaveformCodec, clips: Clips, limit: int = 64) -> dict[str, float]:
    """Log-mel L1 of held-out clips after the codec, at 8, 4 and 2 levels as far as it has them."""
    indices = np.random.default_rng(0).permutation(np.flatnonzero(clips.split != "train"))[:limit]
    samples = clips.padded(indices, 12 * FRAME_SAMPLES)
    original = log_mel(samples)
    return {
        f"waveform_{levels}": float(
            (log_mel(codec.decode(codec.encode(samples, levels))) - original).abs().mean()
        )
        for levels in (8, 4, 2)
        if levels <= codec.config.levels
    }
