"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunName = Annotated[str | None, typer.Option("--run", help="Name of the run, whose streams are used.")]
RedisUrl = Annotated[
    str | None,
    typer.Option("--redis-url", help="redis://, rediss:// or unix://; none starts a Redis of its own."),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", help="Folder of a trained model. Default: ERNIE_MULTI_MODEL, else the newest run."
    ),
]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Address of a running gateway instead of a model.")
]
OutFolder = Annotated[Path, typer.Option("--out", "-o", help="Folder that receives the results.")]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Number of training steps.")]
Minutes = Annotated[float | None, typer.Option("--minutes", min=0.1, help="Train for about this long.")]
DataOption = Annotated[str, typer.Option("--data", "-d", help="Corpus to calibrate on, by name or path.")]
TasksOption = Annotated[
    str | None, typer.Option("--tasks", help="Its tasks, joined by commas. Default: all.")
]
SamplesOption = Annotated[int, typer.Option("--samples", min=1, help="Samples of each task.")]
