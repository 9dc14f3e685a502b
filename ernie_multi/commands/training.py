"""Commands that train a network."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ernie_multi.commands import deferred
from ernie_multi.commands.options import Minutes, OutFolder, Steps


class Draws(StrEnum):
    """Which sub-networks a training run draws."""

    own = "own"
    article = "article"
    report = "report"
    off = "off"


class Allocation(StrEnum):
    """How a training run decides how many experts a token gets."""

    fixed = "fixed"
    threshold = "threshold"
    null = "null"


def train(
    data: Annotated[
        str, typer.Option("--data", "-d", help="A corpus by name, or a path to JSONL or WebDataset.")
    ],
    out: OutFolder,
    preset: Annotated[
        str | None, typer.Option(help="Size of the network: nano, mini (default), base or report-16l.")
    ] = None,
    elastic: Annotated[
        Draws | None,
        typer.Option(
            help="Sub-networks that training draws: the preset's own, the article's (one for the batch, a "
            "single expert), the report's (any depth, half the experts), or none: off."
        ),
    ] = None,
    allocation: Annotated[
        Allocation | None,
        typer.Option(
            help="Experts a token: fixed, or by need: threshold (as many as reach a share of the router's "
            "scores), null (null experts compete for the slots)."
        ),
    ] = None,
    mean_experts: Annotated[
        float | None, typer.Option(min=1, help="Experts a token in the mean, by need. Default: 2.")
    ] = None,
    steps: Steps = None,
    minutes: Minutes = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in --out.")] = False,
    seed: Annotated[int, typer.Option(help="Order of the data, initial weights and draws.")] = 0,
    init: Annotated[
        Path | None, typer.Option(help="Model folder to begin with, instead of fresh weights of a preset.")
    ] = None,
    validate_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between losses of sub-models on held-out samples.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto (a GPU where there is one), cpu, cuda or cuda:1.")
    ] = "auto",
    tf32: Annotated[bool, typer.Option(help="On a GPU, float32 products in TF32.")] = True,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the dense parts: a minute first, faster steps after.")
    ] = False,
) -> None:
    """Train on a corpus, starting the services that it needs."""
    deferred.function("ernie_multi.training", "train")(
        data,
        out,
        preset=preset,
        elastic=None if elastic is None else elastic.value,
        allocation=None if allocation is None else allocation.value,
        mean_experts=mean_experts,
        steps=steps,
        minutes=minutes,
        resume=resume,
        seed=seed,
        start_from=init,
        validate_every=validate_every,
        device=device,
        tf32=tf32,
        compile=compile_,
    )


def demo(
    out: OutFolder = Path("runs/demo"),
    steps: Steps = None,
    minutes: Minutes = None,
    quick: Annotated[bool, typer.Option(help="A few steps only: shows that all parts work.")] = False,
) -> None:
    """Train `mini` from scratch on real digits, speech, emoji and text, then show what it answers."""
    deferred.function("ernie_multi.demo", "run")(out, steps=steps, minutes=minutes, quick=quick)
