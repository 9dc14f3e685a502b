"""`ernie-multi export` and `ernie-multi elastic`: sub-models of a trained model, and what each of them costs.

Both measure on rows of a corpus, tokenised in this process: importance on its training split, quality on its
held-out one.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ernie5.backbone.inference.offload import parse_bytes
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.tokens import TokenSegment, TokenSequence
from ernie5.services.tokenizer_service import TOKENIZERS
from ernie_multi.local import LocalModel
from ernie_multi.models import find_model

if TYPE_CHECKING:
    from ernie5.backbone.elastic.subnetwork import SubNetwork
    from ernie5.backbone.elastic.surface import Point
    from ernie5.backbone.model.transformer import Backbone
    from ernie5.backbone.rows import RowBatch
    from ernie5.corpora.corpus import Corpus

PROVENANCE = "subnetwork.json"


def export(
    checkpoint: Path,
    out: Path,
    *,
    depth: float | None = None,
    experts: float | None = None,
    top_k: int | None = None,
    budget_memory: str | None = None,
    budget_latency: str | None = None,
    tune: int = 0,
    data: str = "mini",
    tasks: str | None = None,
    samples: int = 32,
    seed: int = 0,
) -> None:
    """Extract a sub-model into ``out``: of the shares given, or the best one within the budgets.

    Args:
        checkpoint: a model's or a run's folder.
        depth, experts: share of the layers and of the experts kept.
        budget_memory: resident weights, ``200MB``.
        budget_latency: a prompt and twenty tokens on one core, ``150ms``.
        tune: steps of training after extraction.
        samples: calibration samples of each task.

    Raises:
        InvalidInputError: no such model or corpus, an impossible request, or no sub-model within the budgets.
        TokenizerMismatchError: the model was trained with other tokenizers.
    """
    from ernie5.backbone.elastic.extraction import extract
    from ernie5.backbone.training.checkpoint import save_model

    folder = find_model(checkpoint)
    if out.exists() and any(out.iterdir()):
        raise InvalidInputError(f"{out} is not empty; name a new folder", param="out")
    memory = None if budget_memory is None else parse_bytes(budget_memory, param="budget_memory")
    latency = None if budget_latency is None else parse_milliseconds(budget_latency)
    shares = (depth, experts, top_k)
    budgeted = memory is not None or latency is not None
    if budgeted and shares != (None, None, None):
        raise InvalidInputError(
            "a budget chooses depth, experts and k itself; give either those or budgets",
            param="budget_memory",
        )
    if not budgeted and shares == (None, None, None):
        raise InvalidInputError(
            "nothing to leave out: give --depth, --experts, --top-k or a budget", param="depth"
        )
    for split in ("train", "test") if budgeted else ("train",):
        open_tasks(data, split, tasks)
    console = Console(stderr=True)
    model = open_model(folder, *shares)
    figures: dict[str, Any] = {}
    if budgeted:
        subnetwork, figures = _within_budgets(model, memory, latency, data, tasks, samples, seed, console)
    else:
        subnetwork = _of_shares(model, depth, experts, top_k, data, tasks, samples, seed, console)
    part = extract(model.model, subnetwork)
    if tune:
        _tune(part, model, open_tasks(data, "train", tasks), tune, seed, console)
    save_model(out, part, model.hashes)
    kept = {
        "parent": str(folder.resolve()),
        "layers": list(subnetwork.layers),
        "experts": [subnetwork.experts[layer] for layer in subnetwork.layers],
        "top_k": subnetwork.top_k,
        "calibration": {"data": data, "tasks": tasks, "samples": samples, "seed": seed},
        "tuned_steps": tune,
        **figures,
    }
    (out / PROVENANCE).write_text(json.dumps(kept) + "\n")
    before, after = ((path / "model.safetensors").stat().st_size for path in (folder, out))
    console.print(
        f"[bold]{out}[/]: {part.config.name}, {after / 1e6:.1f} MB of {before / 1e6:.1f} MB, "
        f"layers {', '.join(map(str, subnetwork.layers))}, {part.config.experts} experts, "
        f"k {part.config.top_k}"
    )


def elastic(
    checkpoint: Path,
    *,
    data: str = "mini",
    tasks: str | None = None,
    samples: int = 32,
    seed: int = 0,
    latency: bool = True,
    as_json: bool = False,
    plot: Path | None = None,
) -> None:
    """Measure the trade-off surface of a model: a table with the Pareto front, a plot, or JSON.

    Args:
        samples: samples of each task, for calibration and again for the held-out loss.
        latency: time each sub-model too.
        plot: where the picture goes; default: ``elastic.png`` in the model's folder.

    Raises:
        InvalidInputError: no such model, corpus or task.
        TokenizerMismatchError: the model was trained with other tokenizers.
    """
    folder = find_model(checkpoint)
    for split in ("train", "test"):
        open_tasks(data, split, tasks)
    console = Console(stderr=True)
    model = open_model(folder)
    points = _surface(model, data, tasks, samples, seed, console, memory=True, latency=latency)
    picture = plot or folder / "elastic.png"
    draw(points, picture, model.model.config.name)
    if as_json:
        print(json.dumps({"model": str(folder), "points": [point.as_json() for point in points]}, indent=1))
        return
    Console().print(table_of(points))
    print(f"plot: {picture}")


def open_model(
    folder: Path, depth: float | None = None, experts: float | None = None, top_k: int | None = None
) -> LocalModel:
    """A model that has the sub-network asked for, and whose tokenizers are all the installed ones.

    Checked before anything is measured, the sub-network before the weights are read.

    Raises:
        InvalidInputError: no layer or expert left, or k above the active experts or the model's own.
        TokenizerMismatchError: the model was trained with other tokenizers.
    """
    from ernie5.backbone.elastic.subnetwork import checked_top_k, expert_count, layer_count
    from ernie5.backbone.training.checkpoint import read_config

    config, _ = read_config(folder)
    layer_count(config, depth)
    checked_top_k(config, top_k, expert_count(config, experts))
    model = LocalModel(folder)
    for service in TOKENIZERS:
        model.tokenizer(service)
    return model


def parse_milliseconds(text: str) -> float:
    """Milliseconds of ``50ms``, ``0.2s``.

    Raises:
        InvalidInputError: not a duration.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", text.lower())
    if found is None or float(found[1]) <= 0:
        raise InvalidInputError(f"{text!r} is no duration; write 50ms or 0.2s", param="budget_latency")
    return float(found[1]) * (1 if found[2] == "ms" else 1000)


def open_tasks(data: str, split: str, tasks: str | None) -> Corpus:
    """A corpus, of the tasks named, joined by commas.

    Raises:
        InvalidInputError: no such corpus, or a task that it lacks.
    """
    from ernie5.corpora.corpus import open_corpus

    if tasks is None:
        return open_corpus(data, split)
    wanted = {name.strip() for name in tasks.split(",") if name.strip()}
    corpus = open_corpus(data, split, tasks=wanted)
    if missing := wanted - set(corpus.tasks):
        known = ", ".join(open_corpus(data, split).tasks)
        raise InvalidInputError(
            f"{data} has no task {', '.join(sorted(missing))} in its {split} split; it has {known}",
            param="tasks",
        )
    return corpus


def token_samples(model: LocalModel, corpus: Corpus, samples: int, seed: int) -> list[TokenSequence]:
    """``samples`` random samples of each task, tokenised, in random order; a function of the seed."""
    generator = np.random.default_rng(seed)
    chosen = [
        index
        for task in corpus.tasks
        for index in generator.permutation(corpus.indices(task))[:samples].tolist()
    ]
    return list(tokenised(model, corpus, generator.permutation(chosen).tolist()))


def tokenised(model: LocalModel, corpus: Corpus, indices: Sequence[int]) -> Iterator[TokenSequence]:
    """Samples of a corpus as tokens, 64 at a time."""
    for start in range(0, len(indices), 64):
        part = [corpus[index] for index in indices[start : start + 64]]
        spans = iter(model.encode([segment for sample in part for segment in sample.segments]))
        for sample in part:
            segments = tuple(TokenSegment(next(spans), segment.role) for segment in sample.segments)
            yield TokenSequence(sample.sample_id, segments)


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda doing: bar.update(task, description=doing, advance=1)


def batches_of(model: LocalModel, corpus: Corpus, *, samples: int, seed: int) -> list[RowBatch]:
    """Packed rows of ``samples`` random samples of each task.

    Raises:
        TokenizerMismatchError: the model was trained with other tokenizers.
    """
    from ernie5.backbone.elastic.calibration import calibration_batches

    return calibration_batches(token_samples(model, corpus, samples, seed), model.model.config)


def _batches(
    model: LocalModel, data: str, split: str, tasks: str | None, samples: int, seed: int, console: Console
) -> list[RowBatch]:
    corpus = open_tasks(data, split, tasks)
    with console.status(f"tokenising {samples} samples a task of {data}, {split} split"):
        return batches_of(model, corpus, samples=samples, seed=seed)


def _of_shares(
    model: LocalModel,
    depth: float | None,
    experts: float | None,
    top_k: int | None,
    data: str,
    tasks: str | None,
    samples: int,
    seed: int,
    console: Console,
) -> SubNetwork:
    from ernie5.backbone.elastic.importance import select_subnetwork, selection_passes
    from ernie5.backbone.elastic.subnetwork import checked_top_k, expert_count, whole

    config = model.model.config
    k = checked_top_k(config, top_k, expert_count(config, experts))
    passes = selection_passes(config, depth, experts)
    if not passes:
        full = whole(config)
        return type(full)(full.layers, full.experts, k)
    batches = _batches(model, data, "train", tasks, samples, seed, console)
    with _progress(console, "measuring importance", passes) as advance:
        return select_subnetwork(
            model.model,
            batches,
            depth=depth,
            width=experts,
            top_k=top_k,
            on_pass=lambda: advance("measuring importance"),
        )


def _within_budgets(
    model: LocalModel,
    memory: int | None,
    latency: float | None,
    data: str,
    tasks: str | None,
    samples: int,
    seed: int,
    console: Console,
) -> tuple[SubNetwork, dict[str, Any]]:
    from ernie5.backbone.elastic.surface import best_within

    points = _surface(
        model,
        data,
        tasks,
        samples,
        seed,
        console,
        memory=memory is not None,
        latency=latency is not None,
    )
    best = best_within(points, memory=memory, latency_ms=latency)
    Console(stderr=True).print(table_of([best]))
    return best.subnetwork, {"measured": best.as_json()}


def _surface(
    model: LocalModel,
    data: str,
    tasks: str | None,
    samples: int,
    seed: int,
    console: Console,
    *,
    memory: bool,
    latency: bool,
) -> list[Point]:
    from ernie5.backbone.elastic.surface import default_grid, measure_surface, surface_steps

    config = model.model.config
    calibration = _batches(model, data, "train", tasks, samples, seed, console)
    held_out = _batches(model, data, "test", tasks, samples, seed + 1, console)
    grid = default_grid(config)
    with _progress(console, "measuring", surface_steps(config, grid)) as advance:
        return measure_surface(
            model.model,
            model.hashes,
            calibration,
            held_out,
            grid=grid,
            prompt=picture_question(model) if latency else None,
            memory=memory,
            on_step=advance,
        )


def picture_question(model: LocalModel) -> TokenSequence:
    """A picture and a question about it: the prompt that is timed."""
    from ernie5.corpora.corpus import open_corpus
    from ernie_multi.local import question_of

    sample = open_corpus("mini", "test", tasks={"digit_read"})[0]
    question = question_of(sample)
    spans = model.encode(question)
    segments = tuple(TokenSegment(span, segment.role) for span, segment in zip(spans, question))
    return TokenSequence(sample.sample_id, segments)


def _tune(part: Backbone, model: LocalModel, corpus: Corpus, steps: int, seed: int, console: Console) -> None:
    """Train an extracted model in place, without elastic draws, at a small learning rate."""
    from ernie5.backbone.config import ElasticConfig
    from ernie5.backbone.training.trainer import Trainer, TrainingConfig

    config = part.config.model_copy(update={"elastic": ElasticConfig.off()})
    training = TrainingConfig(
        steps=steps,
        learning_rate=5e-4,
        warmup=max(1, min(20, steps // 10)),
        checkpoint_every=steps,
        seed=seed,
    )

    def samples() -> Iterator[tuple[int, TokenSequence]]:
        generator = np.random.default_rng(seed)
        orders = (generator.permutation(len(corpus)).tolist() for _ in itertools.count())
        epochs = (tokenised(model, corpus, order) for order in orders)
        yield from enumerate(itertools.chain.from_iterable(epochs))

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, training, Path(folder), model.hashes)
        trainer.model.load_state_dict(part.state_dict())
        with _progress(console, "tuning", steps) as advance:
            for report in trainer.run(samples()):
                advance(f"tuning, loss {report.loss:.3f}")
        part.load_state_dict(trainer.model.state_dict())


def table_of(points: Sequence[Point]) -> Table:
    """The surface as a table; a star marks the Pareto front."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("", "layers", "experts", "k", "loss", "exact", "M params", "M active", "MB", "answer ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        latency, exact = point.latency, point.loss.exact
        table.add_row(
            "*" if point.front else "",
            str(point.layers),
            str(point.experts),
            str(point.top_k),
            f"{point.loss.total:.3f}",
            "–" if exact is None else f"{100 * exact:.1f}%",
            f"{point.parameters / 1e6:.2f}",
            f"{point.active_parameters / 1e6:.2f}",
            "–" if point.resident_bytes is None else f"{point.resident_bytes / 1e6:.1f}",
            "–" if latency is None else f"{latency.answer_ms:.0f}",
            style="bold" if point.front else "",
        )
    return table


def draw(points: Sequence[Point], path: Path, name: str) -> None:
    """Loss over memory and over latency, the Pareto front filled; PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from ernie5.backbone.elastic.surface import ANSWER_TOKENS, costs

    timed = points[0].latency is not None
    labels = [
        "resident weights, MB" if points[0].resident_bytes is not None else "weights, MB",
        f"question and {ANSWER_TOKENS} tokens on one core, ms" if timed else "active parameters, millions",
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    depths = sorted({point.layers for point in points})
    colours = dict(zip(depths, pyplot.get_cmap("viridis")(np.linspace(0, 0.9, len(depths)))))
    markers = dict(zip(sorted({point.top_k for point in points}), "osD^vP*"))
    for axis, index, unit, label in zip(axes, (1, 2), (1e6, 1.0 if timed else 1e6), labels):
        for point in points:
            axis.scatter(
                costs(point)[index] / unit,
                point.loss.total,
                s=12 + 60 * point.experts / max(p.experts for p in points),
                marker=markers[point.top_k],
                facecolors=colours[point.layers] if point.front else "none",
                edgecolors=colours[point.layers],
            )
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out loss")
    shapes = [axes[1].scatter([], [], color=colours[depth], label=f"{depth} layers") for depth in depths] + [
        axes[1].scatter([], [], color="grey", marker=marker, label=f"k = {k}")
        for k, marker in markers.items()
    ]
    axes[1].legend(handles=shapes, fontsize=8)
    figure.suptitle(f"{name}: sub-models (size: experts; filled: Pareto front)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
