"""The recipe that trains the picture tokenizer's weights on one CPU core.

    train(load_training_data(folder), minutes=22, out=Path("runs/vision-tokenizer"))

A run is bounded by minutes (the learning rate follows the time spent) or by steps, writes a checkpoint now
and then, and goes on from it with ``resume=True``. Minutes are processor time, so other work on the machine
makes a run later, not worse. It ends with the weights in float16, a card with the held-out figures, and a
sample grid.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from ernie5.protocol.grids import schedule_for
from ernie5.tokenizers.vision.model import STRIDE, VisionModel, VisionModelConfig, count_parameters
from ernie5.tokenizers.vision.training.checkpoint import (
    FILE,
    Checkpoint,
    named,
    optimizer_state,
    restore_optimizer,
    round_to_half,
    write_json,
)
from ernie5.tokenizers.vision.training.data import BatchSampler, TrainingData
from ernie5.tokenizers.vision.training.driver import Length, drive
from ernie5.tokenizers.vision.training.evaluation import evaluate, write_sample_grid
from ernie5.tokenizers.vision.training.judge import train_judge
from ernie5.tokenizers.vision.training.losses import ExtraLosses, ExtraLossOptions
from ernie5.tokenizers.vision.training.metrics import ssim
from ernie5.tokenizers.vision.training.optimizer import Muon, follow_cosine
from ernie5.tokenizers.vision.training.quantiser import BitBalance, quantise_straight_through
from ernie5.tokenizers.vision.training.teacher import Teacher
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
        data: see :func:`~ernie5.tokenizers.vision.training.data.load_training_data`.
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
    length = Length(minutes, steps)
    options = options or TrainingOptions()
    run = _Run(data, config or VisionModelConfig(), options, out)
    if extra is not None:
        run.extra = ExtraLosses(extra, run.model.config.trunk_width, teacher)
    drive(run, "picture tokenizer", length, pause_seconds=options.evaluate_seconds, resume=resume)
    run.save()
    final = run.averaged_model()
    round_to_half(final)
    figures = evaluate(final, data, run.judge)
    write_sample_grid(final, data, out / "samples.png")
    write_json(out / "metrics.json", {"figures": figures, "curve": run.curve})
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
        self.data, self.options, self.out = data, options, out
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

    @cached_property
    def judge(self) -> nn.Module:
        return train_judge(self.data.digits, self.data.digit_labels)

    def advance(self, progress: float) -> float:
        """One step at ``progress`` in [0, 1) of the run; returns the running mean squared error."""
        started = time.process_time()
        options = self.options
        follow_cosine(self.optimizers.values(), self.step, progress, warm_up=50, least=0.005)
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

    def note(self) -> str:
        return f"{-10 * math.log10(self.error):.2f} dB"

    def log(self) -> None:
        figures = evaluate(self.averaged_model(), self.data, self.judge, limit=200)
        self.curve.append({"step": self.step, "seconds": round(self.seconds, 1), **figures})
        write_json(self.out / "metrics.json", {"curve": self.curve})

    def save(self) -> None:
        tensors = named("model", self.model.state_dict()) | named("average", self.average)
        for kind, optimizer in self.optimizers.items():
            tensors |= named(kind, optimizer_state(optimizer))
        tensors |= named("balance", self.balance.state())
        if self.extra is not None:
            tensors |= named("extra", self.extra.state())
        counters = {"step": self.step, "seconds": self.seconds, "error": self.error, "curve": self.curve}
        Checkpoint(tensors, counters, {"format": str(FORMAT_VERSION)}).write(self.out / FILE)
        write_json(self.out / "checkpoint.json", counters)  # for people; the tensors' file holds the same

    def restore(self) -> None:
        """Load the checkpoint of ``out``, if there is one."""
        checkpoint = Checkpoint.read(self.out / FILE)
        if checkpoint is None:
            return
        self.model.load_state_dict(checkpoint.part("model"))
        self.average = checkpoint.part("average")
        self.balance.restore(checkpoint.part("balance"))
        if self.extra is not None:
            self.extra.restore(checkpoint.part("extra"))
        for kind, optimizer in self.optimizers.items():
            restore_optimizer(optimizer, checkpoint.part(kind))
        counters = checkpoint.counters
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
