"""The recipe that trains the semantic encoder's weights on one CPU core.

    train_vit(load_vit_data(folder), load_teacher(), minutes=12, out=Path("runs/vit"))

It learns three things at once: what the teacher sees in each cell, what the teacher sees in the whole drawing
(whatever its place, size and background in the learner's view), and the drawings' and digits' labels. Without
a teacher only labels are left. The heads that predict all this are thrown away; the features stay.

Minutes are processor time. A run writes a checkpoint now and then and goes on from it with ``resume=True``;
it ends with the weights in float16, a card, and the held-out figures beside those of the tokenizer's own
encoder.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.tokenizers.vision.model import VisionModel, count_parameters
from ernie5.tokenizers.vision.training.checkpoint import (
    FILE,
    Checkpoint,
    named,
    optimizer_state,
    restore_optimizer,
    round_to_half,
    write_json,
)
from ernie5.tokenizers.vision.training.data import DIGIT_GRID, OTHER_GRIDS, PICTURE_GRID, canvases_of
from ernie5.tokenizers.vision.training.driver import Length, drive
from ernie5.tokenizers.vision.training.optimizer import Muon, follow_cosine
from ernie5.tokenizers.vision.training.teacher import CELL_WIDTH, WHOLE_WIDTH, Teacher
from ernie5.tokenizers.vision.vit.evaluation import encoders_of, evaluate_features
from ernie5.tokenizers.vision.vit.model import FORMAT_VERSION, VitConfig, VitModel, save_vit
from ernie5.tokenizers.vision.vit.targets import Targets, VitData, ask_teacher, canvas_of, draw_views


@dataclass(frozen=True, slots=True)
class VitOptions:
    """Settings of one run; the loss is the weighted sum of the terms (see :meth:`_Run._loss`)."""

    batch_size: int = 32
    digit_share: float = 0.12
    other_share: float = 0.12
    learning_rate: float = 2e-3
    muon_learning_rate: float = 4e-3
    average_decay: float = 0.998
    cell_weight: float = 1.0
    whole_weight: float = 1.0
    concept_weight: float = 0.2
    digit_weight: float = 0.5
    save_seconds: float = 120.0
    seed: int = 0


def train_vit(
    data: VitData,
    teacher: Teacher | None,
    *,
    out: Path,
    minutes: float | None = None,
    steps: int | None = None,
    resume: bool = False,
    config: VitConfig | None = None,
    options: VitOptions | None = None,
    card: dict[str, object] | None = None,
    beside: VisionModel | None = None,
    categories: dict[str, str] | None = None,
) -> dict[str, object]:
    """Train, evaluate, and write ``vit.safetensors``, ``vit.json`` and ``metrics.json`` to ``out``.

    Args:
        data: see :func:`~ernie5.tokenizers.vision.vit.targets.load_vit_data`.
        teacher: see :func:`~ernie5.tokenizers.vision.training.teacher.load_teacher`; None learns from
            labels only.
        out: folder of the run; what the teacher sees is kept there too.
        minutes: training time, in minutes of the processor, without the teacher's and the evaluation's; or
        steps: number of steps. Exactly one of the two.
        resume: go on from ``out``'s checkpoint if there is one.
        config: sizes of the model.
        options: settings of the optimisation.
        card: more entries for the card (data, licences, command).
        beside: the picture tokenizer's model, to be measured alone and together with the new features.
        categories: of concepts, for one more held-out measure; never trained on.

    Returns:
        The held-out figures (of the float16 weights).
    """
    length = Length(minutes, steps)
    options = options or VitOptions()
    targets = None
    if teacher is not None:
        targets = ask_teacher(data.arrays.sprites, teacher, out / "targets.safetensors")
    run = _Run(data, targets, config or VitConfig(), options, out)
    drive(run, "semantic encoder", length, pause_seconds=options.save_seconds, resume=resume)
    run.log()
    run.save()
    final = run.averaged_model()
    round_to_half(final)
    figures = evaluate_features(encoders_of(beside, final), data, categories)
    write_json(out / "metrics.json", {"figures": figures, "curve": run.curve})
    save_vit(
        final,
        out / "vit.safetensors",
        {
            **(card or {}),
            "teacher": None if teacher is None else teacher.source,
            "parameters": count_parameters(final),
            "steps": run.step,
            "training_seconds": round(run.seconds, 1),
            "options": asdict(options),
            "figures": figures,
        },
    )
    return figures


class _Heads(nn.Module):
    """What the features must tell, each by one linear layer: so the features tell it plainly."""

    def __init__(self, width: int, concepts: int) -> None:
        super().__init__()
        self.cell = nn.Linear(width, CELL_WIDTH)
        self.whole = nn.Linear(width, WHOLE_WIDTH)
        self.concept = nn.Linear(width, concepts)
        self.digit = nn.Linear(4 * width, 10)


class _Run:
    """State of a training run: model, heads, average, optimisers, counters."""

    def __init__(
        self, data: VitData, targets: Targets | None, config: VitConfig, options: VitOptions, out: Path
    ) -> None:
        torch.manual_seed(options.seed)
        self.options, self.out, self.targets, self.data = options, out, targets, data
        self.concepts = torch.from_numpy(data.concepts)
        self.digits = torch.from_numpy(canvases_of(data.arrays.digits, DIGIT_GRID)[:, :1].copy())
        self.labels = torch.from_numpy(data.arrays.digit_labels).long()
        self.model = VitModel(config)
        self.heads = _Heads(config.width, int(self.concepts.max()) + 1)
        self.average = {name: value.clone() for name, value in self.model.state_dict().items()}
        inner: list[nn.Parameter] = [
            cast(nn.Parameter, layer.weight)
            for layer in self.model.layers.modules()
            if isinstance(layer, nn.Linear)
        ]
        chosen = {id(weight) for weight in inner}
        others = [value for value in self.model.parameters() if id(value) not in chosen]
        others += self.heads.parameters()
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "muon": Muon(inner, options.muon_learning_rate),
            "adamw": torch.optim.AdamW(others, options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
        }
        if targets is not None:
            self.cell_norm = _statistics(targets.cells[:2000].float().transpose(0, 1).flatten(1).T)
            self.whole_norm = _statistics(targets.wholes.float())
        self.step, self.seconds = 0, 0.0
        self.terms: dict[str, float] = {}
        self.curve: list[dict[str, object]] = []

    def advance(self, progress: float) -> dict[str, float]:
        """One step at ``progress`` in [0, 1) of the run; returns the running means of the loss's terms."""
        started = time.process_time()
        follow_cosine(self.optimizers.values(), self.step, progress, warm_up=50, least=0.005)
        terms = self._loss(torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step))
        self.model.zero_grad(set_to_none=True)
        self.heads.zero_grad(set_to_none=True)
        loss: Tensor = sum((weight * term for weight, term in terms.values()), start=torch.zeros(()))
        loss.backward()
        nn.utils.clip_grad_norm_([*self.model.parameters(), *self.heads.parameters()], 1.0)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.step += 1
        decay = min(self.options.average_decay, (1 + self.step) / (20 + self.step))
        with torch.no_grad():
            current = self.model.state_dict()
            torch._foreach_lerp_([self.average[name] for name in current], list(current.values()), 1 - decay)
        for name, (_, term) in terms.items():
            value = float(term.detach())
            self.terms[name] = self.terms.get(name, value) + 0.02 * (value - self.terms.get(name, value))
        self.seconds += time.process_time() - started
        return self.terms

    def _loss(self, random: torch.Generator) -> dict[str, tuple[float, Tensor]]:
        """The terms of one batch, a pure function of the step, each with its weight.

        Cells and wholes: 1 - cosine with the teacher's features, standardised so that no channel drowns the
        others. Concepts and digits: cross-entropy.
        """
        options = self.options
        kind = float(torch.rand((), generator=random))
        if kind < options.digit_share:
            return {"digit": (options.digit_weight, self._digit_loss(random))}
        index = torch.randint(len(self.concepts), (options.batch_size,), generator=random)
        # The teacher saw cells of plain pictures only; half of a batch are those, mirrored or not.
        plain = options.batch_size // 2
        grid = PICTURE_GRID
        if kind < options.digit_share + options.other_share:
            plain, grid = 0, OTHER_GRIDS[int(torch.randint(len(OTHER_GRIDS), (), generator=random))]
        sprites = self.data.arrays.sprites[index[plain:].numpy()]
        pictures = draw_views(sprites, canvas_of(grid), random)
        mirrored = torch.rand(plain, 1, 1, 1, generator=random) < 0.5
        if plain:
            first = torch.from_numpy(self.data.arrays.pictures[index[:plain].numpy()]).float() / 255
            pictures = torch.cat([torch.where(mirrored, first.flip(3), first), pictures])
        brightness = 1 + 0.2 * (torch.rand(len(index), 3, 1, 1, generator=random) - 0.5)
        features = self.model((pictures * brightness).clamp(0, 1))
        pooled = features.mean((2, 3))
        terms: dict[str, tuple[float, Tensor]] = {}
        if self.targets is not None:
            whole = _standard(self.targets.wholes[index].float(), self.whole_norm)
            terms["whole"] = (options.whole_weight, _distance(self.heads.whole(pooled), whole))
            if plain:
                seen = self.targets.cells[index[:plain]].float()
                seen = torch.where(mirrored, seen.flip(3), seen).flatten(2).transpose(1, 2)
                guessed = self.heads.cell(features[:plain].flatten(2).transpose(1, 2))
                terms["cell"] = (options.cell_weight, _distance(guessed, _standard(seen, self.cell_norm)))
        concept = F.cross_entropy(self.heads.concept(pooled), self.concepts[index], label_smoothing=0.1)
        # Without a teacher the names are all there is to learn.
        terms["concept"] = (options.concept_weight if self.targets is not None else 1.0, concept)
        return terms

    def _digit_loss(self, random: torch.Generator) -> Tensor:
        index = torch.randint(len(self.digits), (2 * self.options.batch_size,), generator=random)
        pictures = self.digits[index].float().expand(-1, 3, -1, -1) / 255
        shift = torch.randint(-2, 3, (2,), generator=random).tolist()
        inverted = torch.rand(len(index), 1, 1, 1, generator=random) < 0.1
        pictures = pictures.roll(shift, (-2, -1))
        features = self.model(torch.where(inverted, 1 - pictures, pictures))
        quarters = F.adaptive_avg_pool2d(features, 2).flatten(1)
        return F.cross_entropy(self.heads.digit(quarters), self.labels[index])

    def averaged_model(self) -> VitModel:
        model = VitModel(self.model.config)
        model.load_state_dict(self.average)
        return model.eval()

    def note(self) -> str:
        return " ".join(f"{name} {value:.3f}" for name, value in self.terms.items())

    def log(self) -> None:
        terms = {name: round(value, 4) for name, value in self.terms.items()}
        self.curve.append({"step": self.step, "seconds": round(self.seconds, 1), **terms})
        write_json(self.out / "metrics.json", {"curve": self.curve})

    def save(self) -> None:
        tensors = named("model", self.model.state_dict()) | named("heads", self.heads.state_dict())
        tensors |= named("average", self.average)
        for kind, optimizer in self.optimizers.items():
            tensors |= named(kind, optimizer_state(optimizer))
        counters = {"step": self.step, "seconds": self.seconds, "terms": self.terms, "curve": self.curve}
        Checkpoint(tensors, counters, {"format": str(FORMAT_VERSION)}).write(self.out / FILE)

    def restore(self) -> None:
        """Load the checkpoint of ``out``, if there is one."""
        checkpoint = Checkpoint.read(self.out / FILE)
        if checkpoint is None:
            return
        self.model.load_state_dict(checkpoint.part("model"))
        self.heads.load_state_dict(checkpoint.part("heads"))
        self.average = checkpoint.part("average")
        for kind, optimizer in self.optimizers.items():
            restore_optimizer(optimizer, checkpoint.part(kind))
        counters = checkpoint.counters
        self.step, self.seconds = counters["step"], counters["seconds"]
        self.terms, self.curve = counters["terms"], counters["curve"]


_Norm = tuple[Tensor, Tensor]


def _statistics(x: Tensor) -> _Norm:
    """Mean and deviation of each column of ``[n, C]``."""
    return x.mean(0), x.std(0) + 1e-3


def _standard(x: Tensor, norm: _Norm) -> Tensor:
    # Rare channels fire rarely and strongly; one of them shouldn't decide the cosine.
    return ((x - norm[0]) / norm[1]).clamp(-5, 5)


def _distance(guessed: Tensor, seen: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(guessed, seen, dim=-1).mean()
