"""Experts by need against a fixed number: does the mean hold, do hard tokens get more, what is it worth.

    python benchmarks/routing.py [--steps 300] [--samples 2000] [--seeds 1] [--arms fixed,threshold,null]

Trains a small backbone on one core, once for each arm and seed, on the same samples of the mini corpus, and
measures held-out samples: loss by modality, mean experts a token, Spearman's correlation of experts and loss
with its bootstrap interval, dead experts. Limits of a dynamic allocation are fitted to other held-out samples
first; the mean before that is told too, and for the kinds of position one by one. The last line is JSON.

Arms: ``fixed`` gives every token the budget; ``threshold`` and ``null`` hold it in the mean of each kind of
position, ``pooled`` and ``pooled-null`` only in that of all; ``confidence`` is ``threshold`` without the
guess of each token's difficulty; ``isolated`` and ``turns`` are ``fixed`` with experts isolated by kind of
position and with a round-robin warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ernie5.backbone.config import BackboneConfig, ElasticConfig, preset
from ernie5.backbone.elastic.budget import fit_budget, mean_experts
from ernie5.backbone.evaluation.allocation import rank_correlation, token_costs
from ernie5.backbone.evaluation.routing import calibration_rows, routing_table
from ernie5.backbone.layout import lay_out
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from ernie5.corpora.corpus import open_corpus
from ernie5.corpora.order import position_to_index
from ernie5.protocol.errors import ErnieMultiError
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.tokens import TokenSegment, TokenSequence
from ernie5.protocol.vocabulary import UnifiedVocabulary
from ernie5.services.tokenizer_service import load_tokenizer

BUDGET, MOST = 2, 8
ROW = 256
ARMS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "threshold": {"allocation": {"policy": "threshold", "budget": BUDGET}},
    "null": {"allocation": {"policy": "null", "budget": BUDGET}},
    "pooled": {"allocation": {"policy": "threshold", "budget": BUDGET, "by_kind": False}},
    "pooled-null": {"allocation": {"policy": "null", "budget": BUDGET, "by_kind": False}},
    "confidence": {"allocation": {"policy": "threshold", "budget": BUDGET, "complexity_weight": 0}},
    "isolated": {"pool": "isolated"},
    "turns": {"round_robin_steps": 30},
}


def configuration(arm: str) -> BackboneConfig:
    """The network of an arm: `mini`, narrower and with half the layers."""
    return BackboneConfig.model_validate(
        preset("mini").model_dump()
        | {
            "name": f"routing-{arm}",
            "layers": 4,
            "width": 128,
            "heads": 4,
            "key_heads": 2,
            "expert_width": 64,
            "top_k": MOST if "allocation" in ARMS[arm] else BUDGET,
            "elastic": ElasticConfig.off().model_dump(),
            "router": ARMS[arm],
        }
    )


def tokenised(split: str, count: int) -> list[TokenSequence]:
    """Samples spread evenly over a split of the mini corpus, as token sequences."""
    corpus = open_corpus("mini", split)
    tokenizers = {name: load_tokenizer(name) for name in ("text", "audio", "vision")}
    found = []
    for number in np.unique(np.linspace(0, len(corpus) - 1, count).astype(int)):
        sample = corpus[int(number)]
        segments = []
        for segment in sample.segments:
            tokenizer = tokenizers[modality_of(segment.modality).service]
            (span,) = tokenizer.encode_segments([segment], features=True)
            if isinstance(span, ErnieMultiError):
                break
            segments.append(TokenSegment(span, segment.role))
        else:
            found.append(TokenSequence(sample.sample_id, tuple(segments)))
    return found


def measure(
    arm: str, seed: int, steps: int, train: list[TokenSequence], test: list[TokenSequence], folder: Path
) -> dict[str, Any]:
    """Train an arm and measure it on held-out samples."""
    config = configuration(arm)
    training = TrainingConfig(
        steps=steps, rows=4, row_length=ROW, learning_rate=4e-3, seed=seed, threads=1, checkpoint_every=steps
    )
    trainer = Trainer(config, training, folder, {})
    reports = list(trainer.run(endless(train, seed)))
    vocabulary = UnifiedVocabulary(config.text_vocabulary)
    model = trainer.model.eval()
    calibration, rows = (
        calibration_rows((lay_out(sample, config, vocabulary) for sample in part), config, length=ROW)
        for part in (test[::3], [sample for number, sample in enumerate(test) if number % 3])
    )
    unfitted = mean_experts(model, rows)
    if unfitted is not None:
        fit_budget(model, calibration)
    table = routing_table(model, rows)
    costs = token_costs(model, rows)
    late = [report.experts_per_token or BUDGET for report in reports[len(reports) // 2 :]]
    result: dict[str, Any] = {
        "experts_training": round(float(np.mean(late)), 3),
        "experts_held_out_unfitted": None if unfitted is None else round(unfitted, 3),
        "experts_held_out": round(float(table.use.sum() / table.tokens.sum() / config.layers), 3),
        "experts_by_kind": {
            name: round(float(np.nanmean(values)), 2)
            for name, values in zip(table.groups, table.experts_per_token())
        },
        "dead": int(table.dead().sum()),
        "busiest": round(float(table.busiest().max()), 2),
        "loss": {name: round(float(cost.loss.mean()), 4) for name, cost in costs.items()},
    }
    if "allocation" in ARMS[arm]:
        result["rank_correlation"] = {}
        for name, cost in costs.items():
            found = rank_correlation(cost)
            result["rank_correlation"][name] = [
                round(value, 3) for value in (found.rho, found.low, found.high)
            ]
    return result


def endless(samples: list[TokenSequence], seed: int) -> Iterator[tuple[int, TokenSequence | None]]:
    """Samples in a new order each epoch."""
    position = 0
    while True:
        epoch, place = divmod(position, len(samples))
        yield position, samples[position_to_index(seed, epoch, place, len(samples))]
        position += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--samples", type=int, default=2000, help="of the training split")
    parser.add_argument("--held-out", type=int, default=300, help="samples of the test split")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--arms", default="fixed,threshold,null,confidence")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = tokenised("train", options.samples), tokenised("test", options.held_out)
    print(
        f"{len(train)} training and {len(test)} held-out samples, {options.steps} steps, one thread",
        flush=True,
    )
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        for arm in options.arms.split(","):
            began = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                found = measure(arm, seed, options.steps, train, test, Path(folder))
            found["cpu_seconds"] = round(time.process_time() - began, 1)
            results.setdefault(arm, []).append(found)
            print(f"{arm}, seed {seed}: {json.dumps(found)}", flush=True)
    print(
        json.dumps(
            {"cores": os.cpu_count(), "torch": torch.__version__, "steps": options.steps, "arms": results}
        )
    )


if __name__ == "__main__":
    main()
