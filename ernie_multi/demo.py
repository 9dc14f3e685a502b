"""`ernie-multi demo`: the main job from raw media to a trained model and its answers.

An embedded Redis, the three tokenizer services and ingest are started, `mini` is trained from scratch on the
mini corpus through the stream, and then asked on held-out input. Everything lands in the run's folder:
``report.html``, ``figures.json``, checkpoints, logs.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import ernie_multi
from ernie5.protocol.samples import Sample
from ernie5.protocol.tokens import TokenSegment, TokenSequence
from ernie_multi.client import shipped_example

# Chosen so that training takes about ten minutes on two cores.
STEPS = 600
PLAN = "demo.json"
QUICK_STEPS = 6
QUICK_LIMIT = 12
TRAINING: dict[str, Any] = {
    "rows": 4,
    "row_length": 1024,
    "learning_rate": 4e-3,
    "warmup": 40,
    "checkpoint_every": 200,
    "keep_checkpoints": 1,
}
# Samples an epoch for each item. Understanding needs more passes than generating; drawing an emoji takes four
# times the positions of a digit and more time than the demo has.
REPEATS: dict[str, int] = {"digit_read": 2, "speech_hear": 2, "emoji_draw": 0}


def run(
    out: Path,
    *,
    steps: int | None = None,
    minutes: float | None = None,
    quick: bool = False,
) -> None:
    """Run the demo; a second run of the same length reuses the model, or goes on where one was stopped.

    ``steps`` or ``minutes`` set the length of training; ``quick`` takes a few steps and asks a few questions.
    """
    from ernie5.backbone.training.checkpoint import checkpoints
    from ernie_multi.training import train

    console = Console(stderr=True)
    started = time.monotonic()
    wanted = steps if steps is not None else (QUICK_STEPS if quick else STEPS)
    plan: dict[str, Any] = {
        "steps": wanted,
        "minutes": minutes,
        "training": TRAINING,
        "repeats": REPEATS,
        "tokenizers": tokenizer_hashes(),
    }
    made = _made(out)
    begun = made is not None and all(made.get(key) == value for key, value in _as_json(plan).items())
    if made is not None and begun and "seconds" in made:
        console.print(f"{out} holds a model of this length already; asking it again")
        plan = made
    else:
        if not begun:
            _clear(out)
            (out / PLAN).write_text(json.dumps(plan, indent=1) + "\n")
        result = train(
            "mini",
            out,
            preset="mini",
            steps=wanted,
            minutes=minutes,
            overrides=TRAINING,
            repeats=REPEATS,
            resume=begun,
            console=console,
        )
        plan |= {"seconds": round(result.seconds, 1), "skipped": dict(result.skipped)}
        (out / PLAN).write_text(json.dumps(plan, indent=1) + "\n")
    figures = ask(out, checkpoints(out)[-1], plan, quick=quick, console=console)
    figures["wall_seconds"] = round(time.monotonic() - started, 1)
    (out / "figures.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    _show(figures, console)
    console.print(f"[bold]report: {out / 'report.html'}[/]   figures: {out / 'figures.json'}")


def tokenizer_hashes() -> dict[str, str]:
    """Hashes of the shipped tokenizers: a model of other ones is not reused."""
    from ernie5.services.tokenizer_service import TOKENIZERS, load_tokenizer

    return {name: load_tokenizer(name).hash for name in TOKENIZERS}


def _made(out: Path) -> dict[str, Any] | None:
    """The plan of an earlier run in this folder that left a checkpoint."""
    from ernie5.backbone.training.checkpoint import checkpoints

    try:
        made = json.loads((out / PLAN).read_text())
    except (OSError, ValueError):
        return None
    return made if isinstance(made, dict) and checkpoints(out) else None


def _as_json(plan: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(plan)))


def _clear(out: Path) -> None:
    """Remove what an earlier demo left: its plan, stream, checkpoints and metrics."""
    from ernie5.backbone.training.checkpoint import checkpoints

    (out / PLAN).unlink(missing_ok=True)
    for path in (out / "redis", out / "processes", *checkpoints(out)):
        shutil.rmtree(path, ignore_errors=True)
    (out / "metrics.jsonl").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


def ask(out: Path, folder: Path, plan: Mapping[str, Any], *, quick: bool, console: Console) -> dict[str, Any]:
    """Examine a trained model on the held-out part of the mini corpus; writes the report and the figures."""
    from ernie5.corpora.corpus import open_corpus
    from ernie_multi.demo_tasks import Example, Judges, examine
    from ernie_multi.local import LocalModel
    from ernie_multi.report import write_report

    model = LocalModel(folder, capacity=64, max_length=256)
    train, test = open_corpus("mini"), open_corpus("mini", "test")
    limit = QUICK_LIMIT if quick else 400
    with console.status("training the judges on real digits and real speech"):
        judges = Judges(model, train, test, limit=limit, scale=0.1 if quick else 1.0)
    with console.status("asking on held-out input"):
        examination = examine(model, test, limit=limit, judges=judges)
        use = expert_use(model, [test[i] for i in range(0, len(test), max(1, len(test) // 200))])
    prediction, inputs = article_call(folder)
    outputs = {"image": prediction.image, "audio": prediction.audio}
    examination.examples.append(
        Example(
            "predict",
            inputs["text"],
            "",
            prediction.text,
            None,
            {"image": Path(inputs["image"]).read_bytes(), "audio": Path(inputs["audio"]).read_bytes()},
            {name: data for name, data in outputs.items() if data is not None},
        )
    )
    figures = dict(examination.figures)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    figures |= {
        "steps": metrics[-1]["step"],
        "training_seconds": plan.get("seconds"),
        "tokens_per_second": round(float(np.median([row["tokens"] / row["seconds"] for row in metrics]))),
        "samples_skipped": sum(plan.get("skipped", {}).values()),
    }
    (out / "figures.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    write_report(
        out / "report.html",
        metrics=metrics,
        figures=figures,
        examples=examination.examples,
        expert_use=use,
        facts={
            "network": f"{model.model.config.name}: {parameters / 1e6:.1f} M parameters, "
            f"{model.model.config.layers} layers, {model.model.config.experts} experts of which "
            f"{model.model.config.top_k} a token",
            "training": f"{metrics[-1]['step']} steps, {plan.get('seconds')} s, "
            f"{sum(row['tokens'] for row in metrics)} positions",
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "version": ernie_multi.__version__,
        },
    )
    return figures


def article_call(folder: Path) -> tuple[Any, dict[str, str]]:
    """The call of the article, on the example files that ship."""
    inputs = {
        "text": "这是一只猫",
        "image": str(shipped_example("cat.jpg")),
        "audio": str(shipped_example("meow.wav")),
    }
    return ernie_multi.ErnieMulti(model=folder).predict(inputs), inputs


def expert_use(model: Any, samples: list[Sample]) -> dict[str, np.ndarray]:
    """Share of each expert by layer for each kind of position, on full samples; ``[layers, experts]``."""
    import torch

    from ernie5.backbone.layout import lay_out
    from ernie5.backbone.model.experts import Routing
    from ernie5.backbone.rows import GROUPS, pack
    from ernie5.protocol.vocabulary import UnifiedVocabulary

    config = model.model.config
    vocabulary = UnifiedVocabulary(config.text_vocabulary)
    layouts = []
    for sample in samples:
        spans = model.encode(list(sample.segments))
        segments = tuple(TokenSegment(span, part.role) for span, part in zip(spans, sample.segments))
        layouts.append(lay_out(TokenSequence(sample.sample_id, segments), config, vocabulary))
    length = sum(len(layout) for layout in layouts)
    batch = pack([layouts], length, config)
    routing = Routing(keep_choices=True)
    with torch.inference_mode():
        model.model(batch, routing=routing)
    group = batch.group.flatten()
    use: dict[str, np.ndarray] = {}
    for number, name in enumerate(GROUPS):
        here = group == number
        if not here.any():
            continue
        share = np.zeros((config.layers, config.experts))
        for layer, choices in routing.choices.items():
            chosen = choices[here].flatten()
            share[layer] = torch.bincount(chosen[chosen >= 0], minlength=config.experts).numpy() / max(
                len(chosen), 1
            )
        use[name] = share
    return use


def _show(figures: Mapping[str, Any], console: Console) -> None:
    from rich.table import Table

    table = Table("held-out figure", "correct", "questions", "judge on real items")
    for name in [key.removesuffix("_n") for key in figures if key.endswith("_n")]:
        judge = figures.get(f"{name}_judge")
        table.add_row(
            name, f"{figures[name]:.1%}", str(figures[f"{name}_n"]), "" if judge is None else f"{judge:.1%}"
        )
    console.print(table)
