"""The recipe that trains the picture tokenizer's weights on one CPU core.

    train(load_training_data(folder), minutes=22, out=Path("runs/vision-tokenizer"))

A run is bounded by minutes (the learning rate follows the time spent) or by steps, writes a checkpoint now
and then, and goes on from it with ``resume=True``. Minutes are processor time, so other work on the machine
makes a run later, not worse. It ends with the weights in float16, a card with the held-out figures, and a
sample grid.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ernie5.protocol.grids import schedule_for
from ernie5.tokenizers.vision.evaluation import evaluate, write_sample_grid
from ernie5.tokenizers.vision.judge import train_judge
from ernie5.tokenizers.vision.losses import ExtraLosses, ExtraLossOptions
from ernie5.tokenizers.vision.metrics import ssim
from ernie5.tokenizers.vision.model import STRIDE, VisionModel, VisionModelConfig, count_parameters
from ernie5.tokenizers.vision.optimizer import Muon
from ernie5.tokenizers.vision.quantiser import BitBalance, quantise_straight_through
from ernie5.tokenizers.vision.teacher import Teacher
from ernie5.tokenizers.vision.training_data import BatchSampler, TrainingData
from ernie5.tokenizers.vision.weights_file import FORMAT_VERSION, save_weights

_LEVEL_EVERY = 10  # steps
_LEVEL_PICTURES = 24
_SPREAD = 1.45  # standard deviation of a latent channel over the value of a bit


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Settings of one run; losses are weighted sums (see :func:`_loss`)."""

    batch_size: int = 12
    digit_share: float = 0.24
    other_share: float = 0.12
    learning_rate: float = 1.5e-3
    muon_learning_rate: float = 3e-3
    average_decay: float = 0.999
    truncated_share: float = 0.12
    truncated_weight: float = 0.5
    narrow_share: float = 0.5
    """Of the pictures, those decoded from a bit width below the largest."""
    squared_weight: float = 20.0
    decibel_weight: float = 0.05
    structure_weight: float = 0.25
    balance_weight: float = 0.02
    commitment_weight: float = 0.01
    evaluate_seconds: float = 600.0
    seed: int = 0


def train(
    data: TrainingData,
    *,
    out: Path,
    minutes: float | None = None,
    steps: int | None = None,
    resume: bool = False,
    config: VisionModelConfig | None = None,
    options: TrainingOptions | None = None,
    card: dict[str, object] | None = None,
    extra: ExtraLossOptions | None = None,
    teacher: Teacher | None = None,
) -> dict[str, object]:
    """Train, evaluate, and write weights (``image.*``), ``samples.png`` and ``metrics.json`` to ``out``.

    Args:
        data: see :func:`~ernie5.tokenizers.vision.training_data.load_training_data`.
        out: folder of the run.
        minutes: training time, in minutes of the processor, evaluation not counted; or
        steps: number of steps. Exactly one of the two.
        resume: go on from ``out``'s checkpoint if there is one.
        config: sizes of the model.
        options: settings of the optimisation.
        card: more entries for the card ``image.json`` (data, licences, command).
        extra: perceptual, adversarial and semantic losses; none if None.
        teacher: of those losses.

    Returns:
        The held-out figures (of the float16 weights).
    """
    if (minutes is None) == (steps is None):
        raise ValueError("give either minutes or steps")
    options = options or TrainingOptions()
    run = _Run(data, config or VisionModelConfig(), options, out)
    if extra is not None:
        run.extra = ExtraLosses(extra, run.model.config.trunk_width, teacher)
    if resume:
        run.restore()
    judge = train_judge(data.digits, data.digit_labels)
    budget = minutes * 60 if minutes is not None else float(steps or 0)
    next_evaluation = run.seconds + options.evaluate_seconds
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("picture tokenizer", total=budget, note="")
        while (spent := run.seconds if minutes is not None else float(run.step)) < budget:
            error = run.advance(spent / budget)
            progress.update(bar, completed=spent, note=f"step {run.step} {-10 * math.log10(error):.2f} dB")
            if run.seconds >= next_evaluation:
                next_evaluation = run.seconds + options.evaluate_seconds
                run.log(evaluate(run.averaged_model(), data, judge, limit=200))
                run.save()
    run.save()
    final = run.averaged_model()
    for parameter in final.parameters():
        parameter.data = parameter.data.half().float()
    figures = evaluate(final, data, judge)
    write_sample_grid(final, data, out / "samples.png")
    _write_json(out / "metrics.json", {"figures": figures, "curve": run.curve})
    save_weights(
        final,
        out / "image.safetensors",
        {
            **(card or {}),
            "parameters": count_parameters(final),
            "steps": run.step,
            "training_seconds": round(run.seconds, 1),
            "options": asdict(options),
            **({} if run.extra is None else {"extra_losses": run.extra.card()}),
            "figures": figures,
        },
    )
    return figures


class _Run:
    """State of a training run: model, average, optimiser, counters."""

    def __init__(
        self, data: TrainingData, config: VisionModelConfig, options: TrainingOptions, out: Path
    ) -> None:
        torch.manual_seed(options.seed)
        self.options, self.out = options, out
        self.model = VisionModel(config)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.average = {name: value.clone() for name, value in self.model.state_dict().items()}
        inner, others = _split_parameters(self.model)
        # Muon on the inner convolutions: 18.4 dB where AdamW alone had 16.0 after 500 steps of batch 10.
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": Muon(inner, options.muon_learning_rate),
            "adamw": torch.optim.AdamW(others, options.learning_rate, betas=(0.9, 0.95), weight_decay=1e-4),
        }
        self.sampler = BatchSampler(
            data,
            batch_size=options.batch_size,
            digit_share=options.digit_share,
            other_share=options.other_share,
            seed=options.seed,
        )
        self.balance = BitBalance()
        self.extra: ExtraLosses | None = None
        self.step, self.seconds = 0, 0.0
        self.error = 0.1
        self.curve: list[dict[str, object]] = []

    def advance(self, progress: float) -> float:
        """One step at ``progress`` in [0, 1) of the run; returns the running mean squared error."""
        started = time.process_time()
        options = self.options
        factor = min(1.0, (self.step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))) + 0.005
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * factor
        self.model.train()
        batch = self.sampler.draw(self.step).contiguous(memory_format=torch.channels_last)
        loss, squared, decoded = _loss(
            self.model, batch, options, self.balance, self.step, self.extra, progress
        )
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers.values():
            optimizer.step()
        if self.extra is not None:
            self.extra.update(batch, decoded, progress)
        if self.step % _LEVEL_EVERY == 0:
            self._level()
        self.step += 1
        decay = min(options.average_decay, (1 + self.step) / (20 + self.step))
        with torch.no_grad():
            current = self.model.state_dict()
            torch._foreach_lerp_([self.average[name] for name in current], list(current.values()), 1 - decay)
        self.error += 0.02 * (squared - self.error)
        self.seconds += time.process_time() - started
        return self.error

    @torch.no_grad()
    def _level(self) -> None:
        """Hold the latent's channels at one spread, and their coarsest bits set in half of the pictures.

        Signs carry no gradient for either: a faint channel has the same bits in every scale after the first,
        so the decoder learns nothing from it and it stays faint (the bits above the smallest width all did);
        and a bit that is always set has nothing left to free it. Measured on pictures as the tokenizer meets
        them.
        """
        latent = self.model.encode(self.sampler.plain(_LEVEL_PICTURES, self.step))[1]
        layer = self.model.to_latent
        assert layer.bias is not None
        spread = latent.std((0, 2, 3)).clamp_min(1e-4)
        rate = (_SPREAD / self.model.config.bits**0.5 / spread).clamp(0.5, 2)
        layer.weight.mul_(rate.view(-1, 1, 1, 1))
        layer.bias.mul_(rate)
        layer.bias.sub_(0.3 * (latent.mean((2, 3)) * rate).median(0).values)

    def averaged_model(self) -> VisionModel:
        model = VisionModel(self.model.config)
        model.load_state_dict(self.average)
        return model.eval()

    def log(self, figures: dict[str, object]) -> None:
        self.curve.append({"step": self.step, "seconds": round(self.seconds, 1), **figures})
        _write_json(self.out / "metrics.json", {"curve": self.curve})

    def save(self) -> None:
        """Write the checkpoint; the previous one stays until the new one is complete."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for kind, optimizer in self.optimizers.items():
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{kind}.{index}.{name}": value for name, value in state.items()}
        tensors |= {f"balance.{name}": value for name, value in self.balance.state().items()}
        if self.extra is not None:
            tensors |= {f"extra.{name}": value for name, value in self.extra.state().items()}
        self.out.mkdir(parents=True, exist_ok=True)
        counters = {"step": self.step, "seconds": self.seconds, "error": self.error, "curve": self.curve}
        metadata = {"state": json.dumps(counters), "format": str(FORMAT_VERSION)}
        path = self.out / "checkpoint.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, path.with_suffix(".part"), metadata)
        os.replace(path.with_suffix(".part"), path)
        _write_json(self.out / "checkpoint.json", counters)  # for people; the tensors' file holds the same

    def restore(self) -> None:
        """Load the checkpoint of ``out``, if there is one."""
        path = self.out / "checkpoint.safetensors"
        if not path.exists():
            return
        tensors = load_file(path)
        self.model.load_state_dict(_below(tensors, "model."))
        self.average = _below(tensors, "average.")
        self.balance.restore(_below(tensors, "balance."))
        if self.extra is not None:
            self.extra.restore(_below(tensors, "extra."))
        for kind, optimizer in self.optimizers.items():
            state: dict[int, dict[str, Tensor]] = {}
            for name, value in _below(tensors, f"{kind}.").items():
                index, key = name.split(".", 1)
                state.setdefault(int(index), {})[key] = value
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        with safe_open(path, framework="pt") as file:
            counters = json.loads(file.metadata()["state"])
        self.step, self.seconds = counters["step"], counters["seconds"]
        self.error, self.curve = counters["error"], counters["curve"]


def _loss(
    model: VisionModel,
    batch: Tensor,
    options: TrainingOptions,
    balance: BitBalance,
    step: int,
    extra: ExtraLosses | None,
    progress: float,
) -> tuple[Tensor, float, Tensor]:
    """Weighted sum of the errors, bit balance, commitment and what ``extra`` adds; the plain squared error;
    and the decoded pictures.

    A share of the pictures is decoded from a random prefix of the scales, at less weight, so that coarse
    scales alone already draw a coarse picture (next-scale generation builds on them); and a share from a
    smaller bit width. The logarithm of the squared error keeps easy pictures improving.
    """
    count, widths = len(batch), model.config.bit_widths
    schedule = schedule_for((batch.shape[2] // STRIDE, batch.shape[3] // STRIDE))
    random = torch.Generator().manual_seed(options.seed * 1_000_003 + step + 500_000_000)
    truncated = torch.rand(count, generator=random) < options.truncated_share
    kept = torch.full((count,), len(schedule))
    if len(schedule) > 1:
        prefix = torch.randint(1, len(schedule), (count,), generator=random)
        kept = torch.where(truncated, prefix, kept)
    bits = torch.full((count,), widths[-1])
    if len(widths) > 1:
        narrow = torch.rand(count, generator=random) < options.narrow_share
        smaller = torch.tensor(widths)[torch.randint(len(widths) - 1, (count,), generator=random)]
        bits = torch.where(narrow, smaller, bits)
    weight = torch.where(truncated, options.truncated_weight, 1.0)
    weight = weight / weight.sum()
    trunk, latent = model.encode(batch)
    latent.register_hook(lambda gradient: _tangential(gradient, latent.detach()))
    coded = quantise_straight_through(latent, schedule, kept, bits, balance)
    decoded = model.decode(coded.total)
    squared = ((decoded - batch) ** 2).mean((1, 2, 3))
    absolute = (decoded - batch).abs().mean((1, 2, 3))
    structure = 1 - ssim(decoded, batch)
    error = options.squared_weight * squared + absolute + options.structure_weight * structure
    error = error + options.decibel_weight * torch.log(squared + 1e-4)
    loss = (
        (weight * error).sum()
        + options.balance_weight * coded.balance_loss
        + options.commitment_weight * coded.commitment_loss
    )
    if extra is not None:
        terms = extra.terms(batch, decoded, trunk, progress, reconstruction=loss, weight=weight)
        loss = loss + sum(terms.values())
    whole = squared.detach()[~truncated]
    return loss, float(whole.mean() if len(whole) else squared.detach().mean()), decoded


def _tangential(gradient: Tensor, latent: Tensor) -> Tensor:
    """The part of ``gradient`` [B, d, h, w] that changes neither mean nor spread of a channel of ``latent``.

    Both are held by :meth:`_Run._level`; pushed by the loss too, they would drift against each other.
    """
    places = (0, 2, 3)
    gradient = gradient - gradient.mean(places, keepdim=True)
    centred = latent - latent.mean(places, keepdim=True)
    along = (gradient * centred).mean(places, keepdim=True) / centred.square().mean(places, keepdim=True)
    return gradient - along * centred


def _split_parameters(model: VisionModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights of the inner convolutions, for Muon; and all others: outer layers, latents, norms, biases."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    outer = [model.encoder[1], model.to_latent, model.from_latent, layers[-1]]
    chosen = {id(layer.weight) for layer in layers if not any(layer is other for other in outer)}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        [parameter for parameter in parameters if id(parameter) in chosen],
        [parameter for parameter in parameters if id(parameter) not in chosen],
    )


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json.part").write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    os.replace(path.with_suffix(".json.part"), path)
