"""`ernie-multi routing`: where a trained model's tokens go, as tables, a picture and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie_multi.models import find_model

if TYPE_CHECKING:
    from ernie5.backbone.evaluation.routing import RoutingTable
    from ernie5.backbone.rows import RowBatch
    from ernie_multi.local import LocalModel

PICTURE, FIGURES = "routing.png", "routing.json"


def run(
    checkpoint: Path | None,
    out: Path,
    *,
    data: str = "mini",
    split: str = "test",
    samples: int = 200,
    row_length: int = 1024,
    depth: float | None = None,
    width: float | None = None,
    top_k: int | None = None,
    fit_budget: bool = False,
    console: Console | None = None,
) -> RoutingTable:
    """Measure routing on samples spread over a corpus; print it, and write a picture and JSON to ``out``.

    Args:
        checkpoint: a model folder or a run; None takes the newest.
        depth, width, top_k: a sub-network instead of the whole model.
        fit_budget: first fit the limits of a dynamic allocation to every other row and write them into the
            model's folder; the rows between are then measured.

    Raises:
        InvalidInputError: no such model, corpus or sub-network, no sample that fits a row, or no budget to
            fit.
        TokenizerMismatchError: the model was trained with other tokenizers.
    """
    from ernie5.backbone.elastic.subnetwork import choose_subnetwork
    from ernie5.backbone.evaluation.allocation import rank_correlation, token_costs
    from ernie5.backbone.evaluation.routing import routing_table
    from ernie5.backbone.evaluation.routing_plots import routing_png
    from ernie_multi.elastic import open_model

    console = console or Console()
    folder = find_model(checkpoint)
    model = open_model(folder, depth, width, top_k)
    if fit_budget and model.model.config.router.allocation.policy == "fixed":
        raise InvalidInputError(
            f"{folder} gives every token {model.model.config.top_k} experts: there is no budget to fit",
            param="fit_budget",
        )
    if fit_budget and (depth, width, top_k) != (None, None, None):
        raise InvalidInputError(
            "the budget is that of the whole model; fit it without depth, experts and k", param="fit_budget"
        )
    chosen = None
    if (depth, width, top_k) != (None, None, None):
        chosen = choose_subnetwork(model.model, depth, width, top_k)
    with console.status(f"reading {samples} samples of {data}"):
        rows = corpus_rows(model, data, split, samples, row_length)
    if fit_budget:
        rows = _fit(model, rows, console)
    table = routing_table(model.model, rows, chosen)
    figures = {"model": str(folder), "data": data, "split": split, **table.as_json()}
    show(table, console)
    if model.model.config.router.allocation.policy != "fixed":
        figures["rank_correlation"] = {}
        for name, costs in token_costs(model.model, rows, chosen).items():
            found = rank_correlation(costs)
            figures["rank_correlation"][name] = found.__dict__
            console.print(
                f"experts a token against loss, {name}: rho {found.rho:.3f} [{found.low:.3f}, "
                f"{found.high:.3f}] ({found.tokens} predictions of {found.samples} samples)"
            )
    out.mkdir(parents=True, exist_ok=True)
    (out / PICTURE).write_bytes(routing_png(table, f"{model.model.config.name}: {data}, {split}"))
    (out / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"picture: {out / PICTURE}   figures: {out / FIGURES}", soft_wrap=True)
    return table


def _fit(model: LocalModel, rows: Sequence[RowBatch], console: Console) -> Sequence[RowBatch]:
    """Fit the budget to every other row and write the limits; returns the others."""
    from ernie5.backbone.elastic.budget import fit_budget, mean_experts
    from ernie5.backbone.training.checkpoint import save_model

    if len(rows) < 2:
        raise InvalidInputError(
            "the budget is fitted to half of the rows and checked on the others, but the samples fill only "
            "one; give more samples",
            param="samples",
        )
    others = rows[1::2]
    before = mean_experts(model.model, others)
    fit_budget(model.model, rows[::2])
    save_model(model.folder, model.model, model.hashes)
    budget = model.model.config.router.allocation.budget
    console.print(
        f"budget of {budget:g} experts a token fitted to {len(rows[::2])} rows; on {len(others)} others "
        f"{mean_experts(model.model, others):.3f}, before {before:.3f}"
    )
    return others


def corpus_rows(
    model: LocalModel, data: str, split: str, samples: int, row_length: int
) -> Sequence[RowBatch]:
    """Packed rows of samples spread evenly over a corpus, without those that can't be read or don't fit."""
    from ernie5.backbone.evaluation.routing import calibration_rows
    from ernie5.backbone.layout import lay_out
    from ernie5.corpora.corpus import open_corpus
    from ernie5.protocol.tokens import TokenSegment, TokenSequence
    from ernie5.protocol.vocabulary import UnifiedVocabulary

    corpus = open_corpus(data, split)
    config = model.model.config
    vocabulary = UnifiedVocabulary(config.text_vocabulary)
    layouts = []
    for number in np.unique(np.linspace(0, len(corpus) - 1, samples).astype(int)) if len(corpus) else ():
        try:
            sample = corpus[int(number)]
            spans = model.encode(list(sample.segments))
            segments = tuple(TokenSegment(span, part.role) for span, part in zip(spans, sample.segments))
            layouts.append(lay_out(TokenSequence(sample.sample_id, segments), config, vocabulary))
        except ErnieMultiError:
            continue
    rows = calibration_rows(layouts, config, length=row_length)
    if not rows:
        raise InvalidInputError(
            f"none of {samples} samples of {data}, {split}, fits a row of {row_length} positions"
        )
    return rows


def show(table: RoutingTable, console: Console) -> None:
    """Print the tables: one of layers, one of overlaps between kinds of position."""
    kinds = [number for number, tokens in enumerate(table.tokens) if tokens]
    names = [table.groups[kind] for kind in kinds]
    entropy, count, overlap = table.entropy(), table.experts_per_token(), table.overlap()
    layers = Table(title="normalised entropy of expert use, by layer")
    for name in ("layer", *names, "experts a token", "dead", "max/mean"):
        layers.add_column(name, overflow="fold", justify="right")
    for layer in table.layers:
        mean = float((count[kinds, layer] * table.tokens[kinds]).sum() / table.tokens.sum())
        layers.add_row(
            str(layer),
            *(f"{entropy[kind, layer]:.3f}" for kind in kinds),
            f"{mean:.2f}",
            str(table.dead()[layer]),
            f"{table.busiest()[layer]:.2f}",
        )
    console.print(layers)
    pairs = [(one, other) for at, one in enumerate(kinds) for other in kinds[at + 1 :]]
    common = Table(title="intersection over union of the most used quarter of the experts, by layer")
    common.add_column("kinds", no_wrap=True)
    for layer in table.layers:
        common.add_column(str(layer), justify="right")
    for one, other in pairs:
        common.add_row(
            f"{table.groups[one]} – {table.groups[other]}",
            *(f"{overlap[layer, one, other]:.2f}" for layer in table.layers),
        )
    console.print(common)
