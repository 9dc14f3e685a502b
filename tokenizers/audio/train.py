"""Training recipe of the audio tokenizer: codec, then vocoder on the frozen codec.

On a laptop::

    python -m ernie5.tokenizers.audio.train --data CLIPS --out RUN [--codec-minutes 50] [--vocoder-minutes 20]

``CLIPS`` is a folder of clips (see :mod:`ernie5.tokenizers.audio.clips`). Progress is shown; a run that was
interrupted goes on where it was, to the same weights. ``RUN`` receives the published weights, the figures on
held-out voices with a picture of spectrograms (:mod:`ernie5.tokenizers.audio.evaluation`), and the curves.

What makes minutes suffice: the codec starts as principal components with clustered codebooks; small batches
and many steps; codebook averages that forget fast at first and slowly at the end; restarts of unused codes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from ernie5.tokenizers.audio.clips import Clips, MelStream, waveform_batch
from ernie5.tokenizers.audio.codec import MelCodec
from ernie5.tokenizers.audio.losses import spectral_loss
from ernie5.tokenizers.audio.mel import log_mel
from ernie5.tokenizers.audio.storage import CODEC_FILE, VOCODER_FILE, publish, read_codec
from ernie5.tokenizers.audio.teacher import find_teacher
from ernie5.tokenizers.audio.training_state import load_state, save_state
from ernie5.tokenizers.audio.vocoder import Vocoder
from ernie5.tokenizers.audio.waveform_train import WaveformRecipe, train_waveform

# Number of levels used, drawn for each clip: every rate is trained, 4 and 8 most.
_LEVEL_DRAWS = (1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 8, 8, 8, 8)
_CHECKED_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes of a run.

    ``*_minutes`` end a phase early, with its learning rate decayed all the same; 0 sets no limit. They count
    the time of this process, so that a busy machine takes nothing from the training; ``*_clock_minutes``
    count the clock's. Only without such limits do two runs give the same weights.
    """

    codec_steps: int = 20_000
    vocoder_steps: int = 8_000
    codec_minutes: float = 0.0
    vocoder_minutes: float = 0.0
    codec_clock_minutes: float = 0.0
    vocoder_clock_minutes: float = 0.0
    codec_learning_rate: float = 1e-3
    vocoder_learning_rate: float = 2e-3
    codec_batch: int = 12
    codec_frames: int = 128
    vocoder_batch: int = 8
    vocoder_samples: int = 10_240
    digit_share: float = 0.33
    changed_share: float = 0.3  # of the items, spectra warped and tilted
    semantic_weight: float = 0.1  # of the first level's distance to the teacher; 0 for none
    start_items: int = 1500  # crops that the principal components and first codebooks are made of
    start_rounds: int = 60
    save_every: int = 500
    seed: int = 0


OnStep = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class _Run:
    """Where a run writes and whom it tells: after each step, the phase's name and the steps done."""

    out: Path
    recipe: Recipe
    progress: Progress
    on_step: OnStep


@dataclass(frozen=True, slots=True)
class _Phase:
    name: str
    steps: int
    minutes: float
    clock_minutes: float
    learning_rate: float


class _CodecTraining(nn.Module):
    """The codec with what only training needs: the first level's reading of what is said."""

    def __init__(self, codec: MelCodec, teacher_width: int) -> None:
        super().__init__()
        self.codec = codec
        latent = codec.config.latent
        self.reader = nn.Sequential(nn.Linear(latent, 128), nn.ELU(), nn.Linear(128, teacher_width))


def train(
    data: Path, out: Path, recipe: Recipe, *, show_progress: bool = True, on_step: OnStep | None = None
) -> dict[str, Any]:
    """Train both models on the ``train`` split of ``data`` and publish them into ``out``.

    Args:
        data: folder of clips.
        out: folder of the run; an interrupted one goes on from its last saved step.
        recipe: sizes.
        show_progress: draw a bar.
        on_step: called after each step with the phase (``codec``, ``vocoder``) and the steps done.

    Returns the curves of both phases, also written as ``out/metrics.json``.
    """
    out.mkdir(parents=True, exist_ok=True)
    clips = Clips.load(data)
    indices = np.flatnonzero(clips.split == "train")
    if not len(indices):
        raise ValueError(f"{data} holds no clip of the split 'train'; splits: {sorted(set(clips.split))}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), disable=not show_progress) as progress:
        run = _Run(out, recipe, progress, on_step or (lambda phase, step: None))
        codec_history = _train_codec(data, clips, indices, run)
        vocoder_history = _train_vocoder(clips, indices, run)
    metrics = {
        "train_minutes_of_audio": float(np.diff(clips.offsets)[indices].sum() / 16_000 / 60),
        "codec": codec_history,
        "vocoder": vocoder_history,
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    return metrics


def _train_codec(data: Path, clips: Clips, indices: np.ndarray, run: _Run) -> dict[str, Any]:
    """Train the codec on log-mels of clips ``indices`` and publish it."""
    recipe = run.recipe
    torch.manual_seed(recipe.seed)
    teacher = find_teacher(data, clips) if recipe.semantic_weight else None
    stream = MelStream.of(clips, indices, teacher)
    module = _CodecTraining(MelCodec(), teacher.width if teacher else 1)
    codec = module.codec

    random = np.random.default_rng((recipe.seed, 0))
    first = stream.batch(recipe.start_items, recipe.codec_frames, recipe.digit_share, random)
    codec.start(first.log_mels, torch.Generator().manual_seed(recipe.seed), recipe.start_rounds)
    held_out = MelStream.of(clips, _checked(clips))

    def loss_of(step: int, done: float) -> tuple[Tensor, dict[str, float]]:
        random = np.random.default_rng((recipe.seed, 1, step))
        batch = stream.batch(
            recipe.codec_batch, recipe.codec_frames, recipe.digit_share, random, recipe.changed_share
        )
        levels = torch.from_numpy(random.choice(_LEVEL_DRAWS, recipe.codec_batch))
        output, latent, quantised = codec(batch.log_mels, levels)
        restarts = torch.Generator().manual_seed(recipe.seed + step) if done < 0.85 else None
        decay = 0.98 if done < 0.5 else 0.99 if done < 0.85 else 0.998
        dead = codec.quantiser.update(latent.detach(), quantised.codes, decay, restarts, step)
        distance = F.l1_loss(output, batch.log_mels)
        loss = distance + 0.1 * F.mse_loss(output, batch.log_mels) + 0.25 * quantised.commitment
        measured = {"log_mel_l1": distance.item(), "restarted": float(dead)}
        if teacher and batch.known.any():
            read = module.reader(quantised.first.transpose(1, 2)[batch.known])
            apart = 1.0 - F.cosine_similarity(read, batch.teacher[batch.known], dim=-1).mean()
            loss = loss + recipe.semantic_weight * apart
            measured["teacher_distance"] = apart.item()
        return loss, measured

    @torch.no_grad()
    def check() -> dict[str, float]:
        if not held_out.frames.shape[-1]:
            return {}
        random = np.random.default_rng(0)
        mels = held_out.batch(_CHECKED_ITEMS, recipe.codec_frames, recipe.digit_share, random).log_mels
        return {
            f"held_out_l1_{levels}": float((codec.decode(codec.encode(mels, levels)) - mels).abs().mean())
            for levels in (8, 4, 1)
        }

    phase = _Phase(
        "codec",
        recipe.codec_steps,
        recipe.codec_minutes,
        recipe.codec_clock_minutes,
        recipe.codec_learning_rate,
    )
    history = _optimise(module, loss_of, phase, run, check)
    history["teacher"] = type(teacher).__name__ if teacher else None
    publish(codec, run.out / CODEC_FILE)
    return history


def _checked(clips: Clips) -> np.ndarray:
    """A few held-out clips of all sources, to watch while training."""
    held_out = np.flatnonzero(clips.split != "train")
    return np.sort(np.random.default_rng(0).permutation(held_out)[:400])


def _train_vocoder(clips: Clips, indices: np.ndarray, run: _Run) -> dict[str, Any]:
    """Train the vocoder on true mels and on those that the published codec decodes."""
    recipe = run.recipe
    torch.manual_seed(recipe.seed)
    codec = read_codec(run.out / CODEC_FILE)
    vocoder = Vocoder()

    def loss_of(step: int, done: float) -> tuple[Tensor, dict[str, float]]:
        random = np.random.default_rng((recipe.seed, 2, step))
        samples = waveform_batch(
            clips, indices, recipe.vocoder_batch, recipe.vocoder_samples, recipe.digit_share, random
        )
        mels = log_mel(samples)
        if step % 2:
            with torch.no_grad():
                mels = codec.decode(codec.encode(mels, int(random.choice((2, 4, 6, 8, 8)))))
        loss, distance = spectral_loss(vocoder(mels), samples)
        return loss, {"log_mel_l1": distance}

    phase = _Phase(
        "vocoder",
        recipe.vocoder_steps,
        recipe.vocoder_minutes,
        recipe.vocoder_clock_minutes,
        recipe.vocoder_learning_rate,
    )
    history = _optimise(vocoder, loss_of, phase, run)
    publish(vocoder, run.out / VOCODER_FILE)
    return history


def _optimise(
    module: nn.Module,
    loss_of: Callable[[int, float], tuple[Tensor, dict[str, float]]],
    phase: _Phase,
    run: _Run,
    check: Callable[[], dict[str, float]] | None = None,
) -> dict[str, Any]:
    """AdamW with warm-up and cosine decay, clipped gradients, resumable; returns the history.

    ``loss_of(step, done)`` draws everything random from ``step``, so that a resumed run repeats nothing.
    ``check`` measures what a point of the curve holds beside the losses.
    """
    optimiser = torch.optim.AdamW(
        module.parameters(), phase.learning_rate, betas=(0.8, 0.99), weight_decay=1e-4, fused=True
    )
    state = run.out / f"{phase.name}-training.safetensors"
    first = 0
    history: dict[str, Any] = {"steps": 0, "minutes": 0.0, "clock_minutes": 0.0, "curve": []}
    if state.exists():
        first, history = load_state(state, module, optimiser)
    task = run.progress.add_task(phase.name, total=phase.steps, completed=first, note="")
    module.train()
    smooth: dict[str, float] = {}
    before = history["minutes"] - time.process_time() / 60
    clock_before = history["clock_minutes"] - time.monotonic() / 60
    for step in range(first, phase.steps):
        shares = [
            (step, phase.steps),
            (before + time.process_time() / 60, phase.minutes),
            (clock_before + time.monotonic() / 60, phase.clock_minutes),
        ]
        done = max(spent / limit for spent, limit in shares if limit)
        if done >= 1.0:
            break
        cosine = 0.5 + 0.5 * math.cos(math.pi * done)
        rate = phase.learning_rate * min(1.0, (step + 1) / 100) * cosine + 1e-5
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss, measured = loss_of(step, done)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        for key, value in measured.items():
            smooth[key] = 0.98 * smooth.get(key, value) + 0.02 * value
        note = " ".join(f"{key} {value:.3f}" for key, value in smooth.items())
        run.progress.update(task, advance=1, note=note)
        history["steps"] = step + 1
        history["minutes"] = before + time.process_time() / 60
        history["clock_minutes"] = clock_before + time.monotonic() / 60
        if (step + 1) % run.recipe.save_every == 0:
            point = {"step": step + 1, "minutes": round(history["minutes"], 2), **smooth}
            history["curve"].append(point | (check() if check else {}))
            save_state(state, module, optimiser, step + 1, history)
            (run.out / f"{phase.name}-curve.json").write_text(json.dumps(history, indent=1))
        run.on_step(phase.name, step + 1)
    save_state(state, module, optimiser, history["steps"], history)
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the audio tokenizer.")
    parser.add_argument("--data", type=Path, required=True, help="folder of clips (*.npz)")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run; an interrupted one goes on"
    )
    default = Recipe()
    parser.add_argument("--codec-steps", type=int, default=default.codec_steps)
    parser.add_argument("--vocoder-steps", type=int, default=default.vocoder_steps)
    for phase in ("codec", "vocoder"):
        parser.add_argument(
            f"--{phase}-minutes",
            type=float,
            default=0.0,
            help=f"end the {phase}'s phase after this much of the process's own time",
        )
        parser.add_argument(
            f"--{phase}-clock-minutes",
            type=float,
            default=0.0,
            help=f"end the {phase}'s phase after this long",
        )
    parser.add_argument(
        "--semantic-weight",
        type=float,
        default=default.semantic_weight,
        help="how much the first level follows the teacher; 0: not at all",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--kind",
        choices=("mel", "waveform"),
        default="mel",
        help="the waveform codec, with adversarial losses, needs a GPU and hours",
    )
    parser.add_argument("--waveform-steps", type=int, default=WaveformRecipe().steps)
    parser.add_argument("--device", default="cpu", help="of the waveform codec; the mel codec uses the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    if arguments.kind == "waveform":
        sizes = WaveformRecipe(steps=arguments.waveform_steps, seed=arguments.seed)
        train_waveform(arguments.data, arguments.out, sizes, device=arguments.device)
        return
    other = ("data", "out", "threads", "kind", "waveform_steps", "device")
    named = {name: value for name, value in vars(arguments).items() if name not in other}
    train(arguments.data, arguments.out, Recipe(**named))


if __name__ == "__main__":
    main()
