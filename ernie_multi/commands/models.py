"""Commands that look into a model's folder or make another one of it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ernie_multi.commands import deferred
from ernie_multi.commands.options import DataOption, OutFolder, SamplesOption, TasksOption


class WeightType(StrEnum):
    """Number format of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def routing(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="A model folder or a run. Default: the newest run's model.")
    ] = None,
    out: OutFolder = Path("runs/routing"),
    data: Annotated[str, typer.Option("--data", "-d", help="Corpus of the samples to route.")] = "mini",
    split: Annotated[str, typer.Option(help="Its part: train or test.")] = "test",
    samples: Annotated[int, typer.Option(min=1, help="Samples, spread evenly over the corpus.")] = 200,
    depth: Annotated[float | None, typer.Option(help="Share of the layers of a sub-network.")] = None,
    experts: Annotated[float | None, typer.Option(help="Share of its experts.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Its experts a token.")] = None,
    fit_budget: Annotated[
        bool,
        typer.Option(
            "--fit-budget",
            help="Fit a dynamic allocation's limits to half of the samples, write them into the model.",
        ),
    ] = False,
) -> None:
    """Show which experts a model uses for what: tables, a picture and JSON by kind of position and layer."""
    deferred.function("ernie_multi.routing", "run")(
        checkpoint,
        out,
        data=data,
        split=split,
        samples=samples,
        depth=depth,
        width=experts,
        top_k=top_k,
        fit_budget=fit_budget,
    )


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A trained model's folder, or a run's.")],
    out: Annotated[Path, typer.Argument(help="Folder of the sub-model; must be empty or not there yet.")],
    depth: Annotated[float | None, typer.Option(help="Share of the layers to keep, 0.6.")] = None,
    experts: Annotated[float | None, typer.Option(help="Share of the experts to keep, 0.5.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts a token.")] = None,
    budget_memory: Annotated[
        str | None, typer.Option(help="Choose the best sub-model whose weights take no more: 200MB.")
    ] = None,
    budget_latency: Annotated[
        str | None,
        typer.Option(help="… that answers twenty tokens to a picture in no more on one core: 150ms."),
    ] = None,
    tune: Annotated[int, typer.Option(min=0, help="Steps of training after extraction.")] = 0,
    data: DataOption = "mini",
    tasks: TasksOption = None,
    samples: SamplesOption = 32,
    seed: Annotated[int, typer.Option(help="Choice of the samples, and tuning.")] = 0,
) -> None:
    """Extract a sub-model, its layers and experts chosen by importance, as a model folder."""
    deferred.function("ernie_multi.elastic", "export")(
        checkpoint,
        out,
        depth=depth,
        experts=experts,
        top_k=top_k,
        budget_memory=budget_memory,
        budget_latency=budget_latency,
        tune=tune,
        data=data,
        tasks=tasks,
        samples=samples,
        seed=seed,
    )


def elastic(
    checkpoint: Annotated[Path, typer.Argument(help="A trained model's folder, or a run's.")],
    data: DataOption = "mini",
    tasks: TasksOption = None,
    samples: SamplesOption = 32,
    seed: Annotated[int, typer.Option(help="Choice of the samples.")] = 0,
    latency: Annotated[bool, typer.Option(help="Time each sub-model.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Picture to write; default in the model's folder.")
    ] = None,
) -> None:
    """Measure what sub-models of a model lose and cost: a table, a plot, the Pareto front."""
    deferred.function("ernie_multi.elastic", "elastic")(
        checkpoint,
        data=data,
        tasks=tasks,
        samples=samples,
        seed=seed,
        latency=latency,
        as_json=as_json,
        plot=plot,
    )


def grow(
    model: Annotated[Path, typer.Argument(help="A trained model's folder, or a run's.")],
    out: Annotated[Path, typer.Argument(help="Model folder to write; must be empty or not there yet.")],
    bits: Annotated[int, typer.Option(min=1, max=32, help="Bits of a visual cell's code.")] = 24,
    vision_weights: Annotated[
        Path | None, typer.Option(help="image.safetensors of the vision tokenizer; default: those that ship.")
    ] = None,
) -> None:
    """Give a model more bits a visual cell, keeping what it knows of those it has."""
    deferred.function("ernie_multi.growth", "grow")(model, out, bits=bits, vision_weights=vision_weights)


def export_hf(
    model: Annotated[Path, typer.Argument(help="A trained model's folder, or a run's.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must be empty or not there yet.")],
    depth: Annotated[float | None, typer.Option(help="Share of the layers to keep.")] = None,
    width: Annotated[float | None, typer.Option(help="Share of the experts to keep.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts a token.")] = None,
    dtype: Annotated[WeightType, typer.Option(help="Number format of the weights.")] = WeightType.float32,
) -> None:
    """Write a model's text path as a Hugging Face folder, for transformers or vLLM."""
    deferred.function("ernie_multi.interop", "export_hf")(
        model, out, depth=depth, width=width, top_k=top_k, dtype=dtype.value
    )


def import_hf(
    source: Annotated[Path, typer.Argument(help="Folder with an Ernie4.5 or Ernie4.5-MoE network.")],
    out: Annotated[Path, typer.Argument(help="Model folder to write; must be empty or not there yet.")],
    experts: Annotated[
        int | None, typer.Option(min=1, help="Routed experts to give to a dense network; default 8.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="How many of those a token gets; default 2.")
    ] = None,
    expert_width: Annotated[
        int | None, typer.Option(min=8, help="Width of those; default an eighth of the dense layers.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights that the folder lacks.")] = 0,
) -> None:
    """Turn a Hugging Face network of the Ernie 4.5 family into a model to train."""
    deferred.function("ernie_multi.interop", "import_hf")(
        source, out, experts=experts, top_k=top_k, expert_width=expert_width, seed=seed
    )
