"""Arms of the elastic benchmark: the network, and training of one arm with the project's own trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _elastic_data import CAPTIONS, DIGITS, TEXT, Data
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ernie5.backbone.config import BackboneConfig, ElasticConfig
from ernie5.backbone.elastic.calibration import calibration_batches
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from ernie5.backbone.training.validation import SubModelValidation

LAYERS, EXPERTS, TOP_K = 8, 16, 4
ROW_LENGTH, ROWS = 512, 8


@dataclass(frozen=True)
class Arm:
    """How one network is trained: its draws, and what differs in the network and the training."""

    elastic: ElasticConfig
    network: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)


# The default draws of depth and width; k drawn for a whole sample, so that some run at k = 1 throughout.
_DRAWS = ElasticConfig(top_k_scope="sample")
# The article's draw of k: a single expert or all of top_k.
_ONE = _DRAWS.model_copy(update={"top_k_range": (1, 1)})

ARMS: dict[str, Arm] = {
    "fixed": Arm(ElasticConfig.off()),
    # Rows of reduced depth cost the full model most, so their probability grows from 0 to its default.
    "elastic": Arm(_ONE, training={"elastic_ramp": 1.0, "elastic_ramp_axes": ("depth",)}),
    "constant": Arm(_DRAWS),
    "ramp": Arm(_DRAWS, training={"elastic_ramp": 1.0}),
    "ramp-distilled": Arm(_DRAWS, training={"elastic_ramp": 1.0, "distillation": 0.5}),
    "calm": Arm(_DRAWS, training={"elastic_calm": 0.3}),
    "small-5of8": Arm(ElasticConfig.off(), network={"layers": 5}),
    "small-3of8": Arm(ElasticConfig.off(), network={"layers": 3}),
    "small-half": Arm(ElasticConfig.off(), network={"experts": EXPERTS // 2}),
    "small-k1": Arm(ElasticConfig.off(), network={"top_k": 1}),
}


def network_of(arm: Arm, *, width: int = 128) -> BackboneConfig:
    """The network of an arm: 8 layers of 16 experts, of which 4 a token."""
    shape: dict[str, Any] = {
        "name": "elastic-benchmark",
        "layers": LAYERS,
        "width": width,
        "heads": width // 32,
        "key_heads": max(1, width // 64),
        "head_dim": 32,
        "experts": EXPERTS,
        "top_k": TOP_K,
        "expert_width": width // 2,
        "audio_layers": 1,
        "elastic": arm.elastic,
    }
    return BackboneConfig(**shape | arm.network)


def train_arm(
    name: str, seed: int, data: Data, work: Path, *, steps: int, validate_every: int = 0, width: int = 128
) -> tuple[Backbone, dict[str, Any]]:
    """Train an arm, or go on from its newest checkpoint, or read it if it is done.

    Returns the model and facts of its training: steps, tokens, seconds a step.
    """
    out = work / f"{name}-seed{seed}-{steps}"
    done = out / "model"
    if (done / "config.json").exists():
        model, _ = load_model(done)
        return model, _facts(out)
    arm = ARMS[name]
    options: dict[str, Any] = {
        "steps": steps,
        "rows": ROWS,
        "row_length": ROW_LENGTH,
        "microbatch_rows": ROWS,
        "threads": 1,
        "warmup": max(1, min(50, steps // 10)),
        "checkpoint_every": 100,
        "keep_checkpoints": 1,
        "seed": seed,
    }
    network = network_of(arm, width=width)
    trainer = Trainer(network, TrainingConfig(**options | arm.training), out, data.tokenizers)
    validation = None
    if validate_every:
        part = {
            DIGITS: data.calibration[DIGITS][:100],
            CAPTIONS: data.calibration[CAPTIONS][:80],
            TEXT: data.calibration[TEXT],
        }
        batches = calibration_batches(data.mixed(part), network, row_length=ROW_LENGTH, rows=4)
        validation = SubModelValidation(batches, out, every=validate_every)
    if trainer.resume() and validation is not None:
        validation.resume(trainer.step)
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, refresh_per_second=1) as progress:
        bar = progress.add_task(f"{name}, seed {seed}", total=steps, completed=trainer.step, loss="")
        for report in trainer.run(data.stream(seed, trainer.position)):
            progress.update(bar, completed=report.step, loss=f"text {report.losses.get('text', 0):.3f}")
            if validation is not None:
                validation.after(trainer.model, report.step)
            if not progress.console.is_terminal and report.step % 50 == 0:
                print(f"  {name} seed {seed}: step {report.step}, {report.losses}", flush=True)
    if validation is not None:
        validation.close()
    save_model(done, trainer.model, data.tokenizers)
    return trainer.model.eval(), _facts(out)


def _facts(out: Path) -> dict[str, Any]:
    reports = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(report["seconds"] for report in reports)
    return {
        "steps": len(reports),
        "tokens": sum(report["tokens"] for report in reports),
        "seconds_a_step": round(seconds[len(seconds) // 2], 3),
        "load_imbalance": round(sum(report["load_imbalance"] for report in reports[-20:]) / 20, 3),
    }
