"""The training loop: ordered samples in, checkpoints out. It knows no Redis and no files but its own."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.elastic.draws import StepDraws
from ernie5.backbone.elastic.ramp import AXES, Axis, elastic_share, scaled
from ernie5.backbone.execution import CPU, Execution, numbers, wait_for
from ernie5.backbone.layout import SampleLayout, lay_out
from ernie5.backbone.model.balance import RoutingSums
from ernie5.backbone.model.placement import place
from ernie5.backbone.model.router import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.complexity import estimate_losses
from ernie5.backbone.objectives.distillation import text_distillation
from ernie5.backbone.objectives.next_group import (
    MODALITIES,
    Losses,
    LossSums,
    LossWeights,
    loss_sums,
    target_counts,
    weighted_loss,
)
from ernie5.backbone.rows import RowBatch, pack
from ernie5.backbone.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from ernie5.backbone.training.packing import PackedStep, pack_steps
from ernie5.backbone.training.schedule import warmup_stable_decay
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary

METRICS = "metrics.jsonl"

# (position, sample) in order; None where the position holds no sample (a tombstone).
SampleStream = Iterator[tuple[int, TokenSequence | None]]


class TrainingConfig(BaseModel):
    """Everything about a run that is not the network.

    ``rows`` rows of ``row_length`` positions make a step. ``learning_rate`` is the peak of a
    warm-up/stable/decay schedule over ``steps``; code embeddings take ``code_learning_rate_factor`` times as
    much. A step's rows run in microbatches of at most ``microbatch_rows``, on a CPU ``threads`` of them at a
    time (0: as many as torch has threads); the number of threads changes no result.

    On ``elastic_ramp_axes`` the probabilities of reduced draws grow over the first ``elastic_ramp`` share of
    the steps and fall over the last ``elastic_calm`` share. Text in rows of reduced depth learns to the share
    ``distillation`` from the full model, at the price of another forward pass of those rows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=1000, ge=1)
    rows: int = Field(default=4, ge=1)
    row_length: int = Field(default=1024, ge=16)
    learning_rate: float = Field(default=3e-3, gt=0)
    code_learning_rate_factor: float = Field(default=5.0, gt=0)
    warmup: int = Field(default=50, ge=1)
    decay: float = Field(default=0.4, ge=0, le=1)
    weight_decay: float = Field(default=0.05, ge=0)
    gradient_clip: float = Field(default=1.0, gt=0)
    seed: int = 0
    checkpoint_every: int = Field(default=200, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    compute_dtype: str = Field(default="float32", pattern="^(float32|bfloat16)$")
    microbatch_rows: int = Field(default=2, ge=1)
    threads: int = Field(default=0, ge=0)
    text_weight: float = Field(default=1.0, ge=0)
    vision_weight: float = Field(default=1.0, ge=0)
    audio_weight: float = Field(default=1.0, ge=0)
    elastic_ramp: float = Field(default=0.0, ge=0, le=1)
    elastic_calm: float = Field(default=0.0, ge=0, le=1)
    elastic_ramp_axes: tuple[Axis, ...] = AXES
    distillation: float = Field(default=0.0, ge=0, le=1)


@dataclass
class StepReport:
    """What a step says about itself; losses are means in nats per prediction."""

    step: int
    losses: dict[str, float]
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    samples: int
    skipped: int
    next_position: int
    seconds: float
    load_imbalance: float
    experts_per_token: float | None = None
    rows_by_depth: dict[int, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items()}


def parameter_groups(model: Backbone, training: TrainingConfig) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices with weight decay, vectors without, code embeddings with larger steps.

    A row of a code embedding moves only when its code occurs, one position in hundreds, so at the common
    learning rate these tables are what training waits for.
    """
    codes: list[torch.nn.Parameter] = []
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name in ("embeddings.audio", "heads.audio.code", "embeddings.scale_index"):
            codes.append(parameter)
        else:
            (matrices if parameter.dim() > 1 else vectors).append(parameter)
    rate = training.learning_rate
    return [
        {"params": matrices, "weight_decay": training.weight_decay, "peak": rate},
        {"params": vectors, "weight_decay": 0.0, "peak": rate},
        {"params": codes, "weight_decay": 0.0, "peak": rate * training.code_learning_rate_factor},
    ]


class Trainer:
    """Steps over an ordered stream of samples; every step is a function of its rows and (seed, step)."""

    def __init__(
        self,
        backbone: BackboneConfig,
        training: TrainingConfig,
        out: Path,
        tokenizers: dict[str, str],
        *,
        execution: Execution = CPU,
        on_checkpoint: Callable[[int], None] | None = None,
        on_skip: Callable[[int, str], None] | None = None,
    ) -> None:
        """
        Args:
            out: folder of checkpoints, ``metrics.jsonl`` and the final model.
            tokenizers: service name to tokenizer hash, tied to the model.
            execution: the device, and what is compiled. On a GPU, and where something is compiled,
                microbatches run one after another.
            on_checkpoint: told the stream position that a written checkpoint covers.
            on_skip: told position and reason of samples the model can't take.

        Raises:
            ValueError: a network that can answer but not be trained so.
            InvalidInputError: the device isn't there.
        """
        backbone.check_trainable()
        self.workers = training.threads or torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None
        self.training, self.out, self.tokenizers = training, out, tokenizers
        self.on_checkpoint, self.on_skip = on_checkpoint, on_skip
        self.vocabulary = UnifiedVocabulary(backbone.text_vocabulary)
        self.model = Backbone(backbone, seed=training.seed)
        self.model.compute_dtype = getattr(torch, training.compute_dtype)
        # Weights are drawn on the host, so they are the same on every device.
        self.device = place(self.model, execution)
        self.losses = Losses.compiled() if execution.compile else Losses()
        if self.device.type != "cpu" or execution.compile:
            torch.set_num_threads(self.workers)
            self.workers, self._pool = 1, None
        else:
            # Small products gain little from threads of their own; microbatches side by side keep cores busy.
            torch.set_num_threads(1)
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="microbatch")
        self.weights = LossWeights(training.text_weight, training.vision_weight, training.audio_weight)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, training), betas=(0.9, 0.95), fused=True
        )
        self._parameters = list(self.model.parameters())
        self.step = 0
        self._covered_step = -1
        self.position = 0
        self.skipped = 0
        self.checkpoint_wanted = False
        out.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Go on from the newest checkpoint in ``out``; False when there is none."""
        found = checkpoints(self.out)
        if not found:
            return False
        state = load_checkpoint(found[-1], self.model, self.optimizer)
        self.step, self.position, self.skipped = state["step"], state["position"], state["skipped"]
        self._forget_later_steps()
        return True

    def _forget_later_steps(self) -> None:
        """Drop the reports of steps that no checkpoint covers: they will be taken again."""
        metrics = self.out / METRICS
        if metrics.exists():
            lines = metrics.read_text().splitlines(keepends=True)
            # A line that was being written when the process died may be cut off.
            whole = [line for line in lines if line.endswith("}\n")]
            metrics.write_text("".join(line for line in whole if json.loads(line)["step"] <= self.step))

    def run(self, samples: SampleStream) -> Iterator[StepReport]:
        """Train until ``steps``; ``samples`` begins at :attr:`position`. A checkpoint is written at the end.

        Raises:
            RuntimeError: the loss is not finite.
        """
        laid_out = ((position, self._lay_out(position, sample)) for position, sample in samples)
        metrics = self.out / METRICS
        if self.step < self.training.steps:
            for packed in pack_steps(laid_out, self.training.rows, self.training.row_length):
                report = self._step(packed)
                with metrics.open("a") as file:
                    file.write(json.dumps(report.as_json()) + "\n")
                if self.checkpoint_wanted or self.step % self.training.checkpoint_every == 0:
                    self.checkpoint()
                yield report
                if self.step >= self.training.steps:
                    break
        if self._covered_step != self.step:
            self.checkpoint()

    def time_step(self) -> float:
        """Seconds of one forward and backward pass over a step's rows of text; changes nothing."""
        config, training = self.model.config, self.training
        rng = np.random.default_rng(0)
        codes = rng.integers(0, config.text_vocabulary, min(48, training.row_length // 2)).astype(np.int32)
        span = TokenSpan("text", SequenceLayout(config.text_vocabulary), codes, "")
        sample = lay_out(TokenSequence("", (TokenSegment(span, "target"),)), config, self.vocabulary)
        rows = [[sample] * (training.row_length // len(sample))] * min(
            training.rows, training.microbatch_rows
        )
        seconds = []
        for _ in range(3):
            batch = pack(rows, training.row_length, config)
            started = time.perf_counter()
            batch = batch.to(self.device, non_blocking=True)
            outputs = self.model(batch, routing=Routing(group=batch.group.flatten()))
            sums = loss_sums(outputs, batch, self.losses)
            weighted_loss(sums, sums.count, config, self.weights).backward()
            wait_for(self.device)
            seconds.append(time.perf_counter() - started)
        self.optimizer.zero_grad(set_to_none=True)
        rounds = -(-training.rows // (training.microbatch_rows * self.workers))
        return min(seconds) * rounds

    def checkpoint(self) -> Path:
        """Write a checkpoint now and say which position it covers."""
        path = save_checkpoint(
            self.out,
            self.step,
            self.model,
            self.optimizer,
            {"position": self.position, "skipped": self.skipped, "training": self.training.model_dump()},
            self.tokenizers,
            keep=self.training.keep_checkpoints,
        )
        self.checkpoint_wanted, self._covered_step = False, self.step
        if self.on_checkpoint is not None:
            self.on_checkpoint(self.position)
        return path

    def _lay_out(self, position: int, sample: TokenSequence | None) -> SampleLayout | None:
        if sample is None:
            return None
        try:
            layout = lay_out(sample, self.model.config, self.vocabulary)
            if len(layout) > self.training.row_length:
                raise InvalidInputError(
                    f"sample has {len(layout)} positions, a row holds {self.training.row_length}; "
                    "raise row_length"
                )
        except InvalidInputError as error:
            if self.on_skip is not None:
                self.on_skip(position, str(error))
            return None
        return layout

    def _step(self, packed: PackedStep) -> StepReport:
        started = time.perf_counter()
        training, config, model = self.training, self.model.config, self.model
        generator = np.random.Generator(np.random.Philox(key=[training.seed, self.step]))
        share = elastic_share(
            self.step, training.steps, ramp=training.elastic_ramp, calm=training.elastic_calm
        )
        drawn = config
        if share < 1:
            elastic = scaled(config.elastic, share, training.elastic_ramp_axes)
            drawn = config.model_copy(update={"elastic": elastic})
        draws = StepDraws(drawn, generator, self.step)
        groups: dict[tuple[int, ...], list[list[SampleLayout]]] = {}
        for row in packed.rows:
            groups.setdefault(draws.layers(), []).append(row)
        microbatches = [
            (layers, pack(rows[start : start + training.microbatch_rows], training.row_length, config))
            for layers, rows in groups.items()
            for start in range(0, len(rows), training.microbatch_rows)
        ]
        counts = dict.fromkeys(MODALITIES, 0.0)
        for _, batch in microbatches:
            for name, value in target_counts(batch).items():
                counts[name] += value
        jobs = [(layers, batch, self._routing(batch, draws), counts) for layers, batch in microbatches]
        routed = RoutingSums.of(config, device=self.device)
        losses: list[torch.Tensor] = []
        # A GPU takes the microbatches from one stream, and the host needn't wait between them.
        results: Iterable[_Microbatch]
        results = (map if self._pool is None else self._pool.map)(lambda job: self._gradients(*job), jobs)
        # Summed in the order of the rows, so that the result doesn't depend on who finishes first.
        for result in results:
            losses += (result.loss, *(result.totals[name] for name in MODALITIES))
            routed.add_(result.routed)
            for parameter, gradient in zip(self._parameters, result.gradients):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip)
        # The step's one wait for the device: all that the host wants to know.
        *values, norm_value = numbers([*losses, norm])
        routed = routed.on_host()
        loss_value, totals = 0.0, dict.fromkeys(MODALITIES, 0.0)
        for start in range(0, len(values), 1 + len(MODALITIES)):
            loss_value += values[start]
            for name, value in zip(MODALITIES, values[start + 1 :]):
                totals[name] += value
        if not np.isfinite(loss_value):
            raise RuntimeError(f"the loss is {loss_value} at step {self.step}; lower the learning rate")
        factor = warmup_stable_decay(self.step, training.steps, warmup=training.warmup, decay=training.decay)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        routed.update(config, [model.feed_forward(index) for index in range(config.layers)])
        self.step += 1
        self.position = packed.next_position
        self.skipped += packed.skipped
        return StepReport(
            step=self.step,
            losses={name: totals[name] / counts[name] for name in counts if counts[name]},
            loss=loss_value,
            learning_rate=training.learning_rate * factor,
            gradient_norm=norm_value,
            tokens=packed.used,
            samples=sum(len(row) for row in packed.rows),
            skipped=self.skipped,
            next_position=self.position,
            seconds=time.perf_counter() - started,
            load_imbalance=routed.imbalance(),
            experts_per_token=routed.experts_per_token(),
            rows_by_depth=dict(Counter(len(layers) for layers, rows in groups.items() for _ in rows)),
        )

    def _routing(self, batch: RowBatch, draws: StepDraws) -> Routing:
        return draws.routing(batch.sample.flatten(), batch.samples, batch.real(), batch.group.flatten())

    def _gradients(
        self, layers: tuple[int, ...], batch: RowBatch, routing: Routing, counts: dict[str, float]
    ) -> _Microbatch:
        """One microbatch's share of the step's loss and its gradients; touches no shared state."""
        config = self.model.config
        if self.device.type != "cpu":
            batch = batch.to(self.device, non_blocking=True)
            routing = routing.to(self.device, non_blocking=True)
        outputs = self.model(batch, layers=layers, routing=routing)
        sums = loss_sums(outputs, batch, self.losses)
        learnt = dict(sums.total)
        if self.training.distillation and len(layers) < config.layers:
            term = text_distillation(self.model, batch, outputs)
            learnt["text"] = learnt["text"] + self.training.distillation * term
        loss = weighted_loss(LossSums(learnt, sums.count), counts, config, self.weights)
        for term in (*routing.auxiliary, *estimate_losses(outputs, batch, routing)):
            # The step's rows share these terms, whatever microbatches they came in.
            loss = loss + term / len(layers) * (batch.shape[0] / self.training.rows)
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        totals = {name: value.detach() for name, value in sums.total.items()}
        routed = RoutingSums.of(config, [routing], self.device)
        return _Microbatch(loss.detach(), totals, routed, gradients)


@dataclass
class _Microbatch:
    loss: torch.Tensor
    totals: dict[str, torch.Tensor]
    routed: RoutingSums
    gradients: tuple[torch.Tensor | None, ...]
