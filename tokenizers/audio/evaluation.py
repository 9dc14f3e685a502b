"""How much survives the codec: a digit judge, log-mel distances and spectrograms to look at.

A small convolutional judge learns which digit is said from original clips of training voices, in all
languages together, and is then asked about held-out voices: originals, and the same clips after the codec.
The ratio of the two accuracies is the figure of merit; it does not punish the codec for clips that the judge
cannot tell even undamaged. Opus and Codec 2 stand beside it where FFmpeg has them.

    python -m ernie5.tokenizers.audio.evaluation --data CLIPS --weights FOLDER --out FOLDER
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ernie5.tokenizers.audio.baselines import BASELINES, Baseline, available, through
from ernie5.tokenizers.audio.clips import FRAME_SAMPLES, Clips
from ernie5.tokenizers.audio.codec import MelCodec
from ernie5.tokenizers.audio.mel import HOP, LOG_FLOOR, SAMPLE_RATE, griffin_lim, log_mel
from ernie5.tokenizers.audio.storage import CODEC_FILE, SHIPPED, VOCODER_FILE, read_codec, read_vocoder
from ernie5.tokenizers.audio.vocoder import Vocoder

JUDGE_SAMPLES = 10 * FRAME_SAMPLES  # 0.8 s, the 99th percentile of spoken digits
LEVELS = (8, 4, 2, 1)
JUDGE_FILE = "judge.safetensors"
WAYS = ("vocoder", "griffin_lim", "codec_mel")
_LEAST = {"griffin_lim": 4}  # levels; phase retrieval is slow, and fewer leave little to retrieve


class DigitJudge(nn.Module):
    """Log-mels ``[B, 80, 80]`` of clips of ``JUDGE_SAMPLES`` to logits ``[B, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 24, 48, 64, 96)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*layers)
        self.out = nn.Linear(widths[-1] * 5 * 5, 10)

    def forward(self, log_mels: Tensor) -> Tensor:
        mean = log_mels.mean((1, 2), keepdim=True)
        normal = (log_mels - mean) / (log_mels.std((1, 2), keepdim=True) + 1e-3)
        return self.out(F.dropout(self.features(normal[:, None]).flatten(1), 0.4, self.training))


def shipped_judge() -> DigitJudge:
    """The judge that comes with the tokenizer: ``weights/judge.safetensors``."""
    judge = DigitJudge()
    judge.load_state_dict(load_file(SHIPPED / JUDGE_FILE))
    return judge.eval()


def train_judge(
    clips: Clips, indices: np.ndarray, steps: int = 900, batch: int = 48, seed: int = 0
) -> DigitJudge:
    """Train a judge on original digit clips ``indices``, with shifts, loudness, noise and masked bands."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    samples = clips.padded(indices, JUDGE_SAMPLES)
    digits = torch.from_numpy(clips.digit[indices])
    kinds = clips.kind[indices]
    # Rare sources (human speakers) are drawn more often, by the square root of their rarity.
    weights = np.array([1.0 / np.sqrt((kinds == kind).sum()) for kind in kinds])
    weights /= weights.sum()
    judge = DigitJudge()
    optimiser = torch.optim.AdamW(judge.parameters(), 2e-3, weight_decay=1e-2)
    for step in range(steps):
        drawn = random.choice(len(indices), batch, p=weights)
        shifts = random.integers(0, 2400, batch)
        noisy = torch.stack([F.pad(samples[i], (int(s), 0))[:JUDGE_SAMPLES] for i, s in zip(drawn, shifts)])
        noisy = noisy * torch.exp(torch.rand(batch, 1) * 1.4 - 0.9)
        mels = log_mel(noisy + torch.randn_like(noisy) * torch.rand(batch, 1) ** 2 * 0.01)
        band = int(random.integers(0, 70))
        mels[:, band : band + 8] = mels.mean()
        loss = F.cross_entropy(judge(mels), digits[drawn], label_smoothing=0.1)
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * (1 - step / steps) + 1e-5
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return judge.eval()


@torch.no_grad()
def in_turn(function: Callable[[Tensor], Tensor], inputs: Tensor, size: int = 16) -> Tensor:
    """``function`` over chunks of ``inputs`` along the first axis, joined again."""
    return torch.cat([function(chunk) for chunk in inputs.split(size)])


def figures(
    clips: Clips,
    codec: MelCodec,
    vocoder: Vocoder,
    judge: DigitJudge,
    baselines: Sequence[Baseline] = (),
    ways: Sequence[str] = WAYS,
) -> dict[str, Any]:
    """Judge accuracies and log-mel distances on held-out voices, all together and by source.

    Returns:
        ``digits``: per system (``original``, ``vocoder_8`` …) and source the share judged right; ``_n``
        counts clips. ``ratio``: the same over the accuracies on the originals. ``log_mel_l1``: per system
        and source, mean absolute difference of log-mels (floor 1e-3) inside the clip; ``codec_mel_8`` are the
        mels that the codec gives, the others are measured on sound. ``bits_a_second``: of each system. Only
        the ``ways`` from codes to sound that are asked for are there.
    """
    held_out = np.flatnonzero((clips.split != "train") & (clips.digit >= 0))
    samples = clips.padded(held_out, JUDGE_SAMPLES)
    inside = torch.from_numpy(np.minimum(np.diff(clips.offsets)[held_out], JUDGE_SAMPLES) // HOP)
    digits = torch.from_numpy(clips.digit[held_out])
    sources = np.array([f"{kind}-{lang}" for kind, lang in zip(clips.kind[held_out], clips.lang[held_out])])
    original = in_turn(log_mel, samples)

    decoded: dict[str, Tensor] = {"original": original}
    makers: dict[str, Callable[[Tensor], Tensor]] = {"griffin_lim": griffin_lim, "vocoder": vocoder}
    sounding = {name: _heard(make) for name, make in makers.items() if name in ways}
    for name, heard in sounding.items():
        decoded[f"{name}_true_mel"] = in_turn(heard, original)
    # As the tokenizer has it: all levels are searched for together, and the first of them are kept.
    codes = in_turn(codec.encode, original)
    for levels in LEVELS:
        mels = in_turn(codec.decode, codes[..., :levels])
        for name, heard in sounding.items():
            if levels >= _LEAST.get(name, 1):
                decoded[f"{name}_{levels}"] = in_turn(heard, mels)
        if "codec_mel" in ways:
            decoded[f"codec_mel_{levels}"] = mels
    rates = {f"{way}_{levels}": _bit_rate(codec, levels) for way in ways for levels in LEVELS}
    for baseline in baselines:
        sounds, rates[baseline.name] = through(baseline, samples)
        decoded[baseline.name] = in_turn(log_mel, sounds)

    mask = (torch.arange(original.shape[-1])[None] < inside[:, None])[:, None].float()
    result: dict[str, Any] = {"digits": {}, "ratio": {}, "log_mel_l1": {}}
    result["digits"]["_n"] = _by_source(torch.ones(len(digits)), sources, count=True)
    for name, mels in decoded.items():
        right = (in_turn(judge, mels).argmax(1) == digits).float()
        result["digits"][name] = _by_source(right, sources)
        result["ratio"][name] = {
            source: round(share / result["digits"]["original"][source], 4)
            for source, share in result["digits"][name].items()
            if result["digits"]["original"][source]
        }
        distance = ((mels - original).abs() * mask).mean(1).sum(1) / mask.sum((1, 2))
        result["log_mel_l1"][name] = _by_source(distance, sources)
    result["bits_a_second"] = {name: round(rates[name]) for name in decoded if name in rates}
    return result


def _heard(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Log-mels of the sound that ``make`` makes of log-mels."""
    return lambda mels: log_mel(make(mels))


def _bit_rate(codec: MelCodec, levels: int) -> float:
    return SAMPLE_RATE / FRAME_SAMPLES * levels * math.log2(codec.config.codebook_size)


@torch.no_grad()
def first_level_reading(clips: Clips, codec: MelCodec, steps: int = 300) -> dict[str, float]:
    """What a linear reader makes of the first level's codes alone: the share of digits it tells, held out.

    It sees how often each code occurs in each third of a clip, and learns from training voices. A second
    reader is asked for the voice, among those of the synthesiser that were trained on: the less it can tell,
    the less of the speaker the first level keeps.
    """
    size = codec.config.codebook_size

    def counts(indices: np.ndarray) -> Tensor:
        found = torch.zeros(len(indices), 3 * size)
        for row, index in enumerate(indices):
            samples = clips.waveform(int(index))[: 4 * JUDGE_SAMPLES]
            mels = log_mel(F.pad(samples, (0, -len(samples) % FRAME_SAMPLES)))[None]
            codes = codec.encode(mels, 1)[0, :, 0]
            thirds = torch.arange(len(codes)) * 3 // len(codes)
            found[row].index_add_(0, thirds * size + codes, torch.ones(len(codes)))
        return found.sqrt()

    digits = np.flatnonzero(clips.digit >= 0)
    learned, asked = digits[clips.split[digits] == "train"], digits[clips.split[digits] != "train"]
    seen = counts(learned)
    read = _linear_reader(seen, torch.from_numpy(clips.digit[learned]), steps)
    right = read(counts(asked)).argmax(1) == torch.from_numpy(clips.digit[asked])
    voices, voice = np.unique(clips.voice[learned], return_inverse=True)
    later = torch.from_numpy(np.random.default_rng(0).random(len(learned)) < 0.2)
    tell = _linear_reader(seen[~later], torch.from_numpy(voice)[~later], steps)
    told = tell(seen[later]).argmax(1) == torch.from_numpy(voice)[later]
    return {
        "digits_right": round(float(right.float().mean()), 4),
        "voices_right": round(float(told.float().mean()), 4),
        "voices": len(voices),
        "_n": len(asked),
    }


@torch.enable_grad()
def _linear_reader(features: Tensor, labels: Tensor, steps: int) -> nn.Linear:
    torch.manual_seed(0)
    reader = nn.Linear(features.shape[1], int(labels.max()) + 1)
    optimiser = torch.optim.AdamW(reader.parameters(), 1e-2, weight_decay=1e-2)
    random = np.random.default_rng(0)
    for step in range(steps):
        drawn = torch.from_numpy(random.integers(0, len(labels), 256))
        optimiser.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        loss = F.cross_entropy(reader(features[drawn]), labels[drawn])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return reader.requires_grad_(False)


@torch.no_grad()
def sound_distances(clips: Clips, codec: MelCodec, vocoder: Vocoder, limit: int = 40) -> dict[str, Any]:
    """Log-mel L1 of held-out clips of every source, whole clips up to 4 s, at 8 and 4 levels."""
    result: dict[str, Any] = {}
    for kind in sorted(set(clips.kind)):
        indices = np.flatnonzero((clips.split != "train") & (clips.kind == kind))
        chosen = np.random.default_rng(0).permutation(indices)[:limit]
        rows = []
        for index in chosen:
            samples = clips.waveform(int(index))[:64_000]
            mels = log_mel(F.pad(samples, (0, -len(samples) % FRAME_SAMPLES)))[None]
            coded = [codec.decode(codec.encode(mels, levels)) for levels in (8, 4)]
            rows.append([float((log_mel(vocoder(part)) - mels).abs().mean()) for part in (*coded, mels)])
        if rows:
            means = np.mean(rows, axis=0).round(4).tolist()
            result[kind] = dict(zip(("vocoder_8", "vocoder_4", "vocoder_true_mel"), means)) | {
                "_n": len(rows)
            }
    return result


@torch.no_grad()
def perplexities(clips: Clips, codec: MelCodec, limit: int = 300) -> list[float]:
    """Perplexity of each level's codes on held-out clips; the codebook size is the most it can be."""
    indices = np.random.default_rng(0).permutation(np.flatnonzero(clips.split != "train"))[:limit]
    counts = torch.zeros(codec.config.levels, codec.config.codebook_size)
    for index in indices:
        samples = clips.waveform(int(index))
        codes = codec.encode(log_mel(F.pad(samples, (0, -len(samples) % FRAME_SAMPLES)))[None])[0]
        for level in range(codec.config.levels):
            counts[level] += torch.bincount(codes[:, level], minlength=codec.config.codebook_size)
    shares = counts / counts.sum(1, keepdim=True)
    return [round(float(p), 1) for p in torch.exp(-(shares * (shares + 1e-12).log()).sum(1))]


@torch.no_grad()
def draw_spectrograms(
    clips: Clips, indices: Sequence[int], codec: MelCodec, vocoder: Vocoder, path: Path
) -> None:
    """A picture: one row a clip; original, vocoder at 8 and 4 levels, Griffin-Lim at 8 levels."""
    from matplotlib.figure import Figure

    titles = ("original", "8 levels, vocoder", "4 levels, vocoder", "8 levels, Griffin-Lim")
    figure = Figure(figsize=(14, 1.9 * len(indices)), layout="constrained")
    axes = figure.subplots(len(indices), len(titles), squeeze=False)
    for row, index in zip(axes, indices):
        samples = clips.waveform(int(index))[:32_000]
        mels = log_mel(F.pad(samples, (0, -len(samples) % FRAME_SAMPLES)))[None]
        eight, four = (codec.decode(codec.encode(mels, levels)) for levels in (8, 4))
        panels = (mels, log_mel(vocoder(eight)), log_mel(vocoder(four)), log_mel(griffin_lim(eight)))
        for axis, panel, title in zip(row, panels, titles):
            axis.imshow(
                panel[0].numpy(), origin="lower", aspect="auto", vmin=LOG_FLOOR, vmax=2.5, cmap="magma"
            )
            axis.set(xticks=[], yticks=[])
            if row is axes[0]:
                axis.set_title(title, fontsize=9)
        name = f"{clips.kind[index]} {clips.lang[index]}\n{clips.voice[index]} {clips.digit[index]}"
        row[0].set_ylabel(name, fontsize=8)
    figure.savefig(path, dpi=80)


def pictured(clips: Clips, rows: int = 10) -> list[int]:
    """Held-out clips to draw: different sources, digits first."""
    held_out = np.random.default_rng(1).permutation(np.flatnonzero(clips.split != "train"))
    seen: dict[tuple[str, str], int] = {}
    for index in sorted(held_out, key=lambda i: clips.digit[i] < 0):
        seen.setdefault((str(clips.kind[index]), str(clips.lang[index])), int(index))
    return list(seen.values())[:rows]


def evaluate(data: Path, weights: Path, out: Path, *, judge_steps: int = 900) -> dict[str, Any]:
    """All figures of the weights in a folder; ``out`` receives ``figures.json`` and ``spectrograms.png``."""
    out.mkdir(parents=True, exist_ok=True)
    clips = Clips.load(data)
    codec, vocoder = read_codec(weights / CODEC_FILE), read_vocoder(weights / VOCODER_FILE)
    draw_spectrograms(clips, pictured(clips), codec, vocoder, out / "spectrograms.png")
    judge = _trained_judge(clips, out / JUDGE_FILE, judge_steps)
    result = figures(clips, codec, vocoder, judge, BASELINES if available() else ())
    result["first_level"] = first_level_reading(clips, codec)
    result["held_out_sounds_log_mel_l1"] = sound_distances(clips, codec, vocoder)
    result["perplexity"] = perplexities(clips, codec)
    (out / "figures.json").write_text(json.dumps(result, indent=1))
    return result


def _trained_judge(clips: Clips, path: Path, steps: int) -> DigitJudge:
    """The judge in ``path``, trained and kept there first where there is none."""
    if not path.exists():
        digits = np.flatnonzero((clips.split == "train") & (clips.digit >= 0))
        judge = train_judge(clips, digits, steps)
        save_file(judge.state_dict(), path)
        return judge
    judge = DigitJudge()
    judge.load_state_dict(load_file(path))
    return judge.eval()


def _by_source(values: Tensor, sources: np.ndarray, count: bool = False) -> dict[str, float]:
    groups = {"all": torch.ones(len(values), dtype=torch.bool)}
    groups |= {name: torch.from_numpy(sources == name) for name in sorted(set(sources))}
    groups["human"] = torch.from_numpy(np.char.startswith(sources, "human"))
    if count:
        return {name: int(group.sum()) for name, group in groups.items()}
    return {name: round(float(values[group].mean()), 4) for name, group in groups.items() if group.any()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the audio tokenizer on held-out voices.")
    parser.add_argument("--data", type=Path, required=True, help="folder of clips (*.npz)")
    parser.add_argument("--weights", type=Path, required=True, help="folder of codec and vocoder weights")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    print(json.dumps(evaluate(arguments.data, arguments.weights, arguments.out), indent=1))


if __name__ == "__main__":
    main()
