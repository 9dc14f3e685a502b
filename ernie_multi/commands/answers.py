"""Commands that ask a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import ernie_multi
from ernie5.protocol.errors import InvalidInputError
from ernie_multi.commands import deferred
from ernie_multi.commands.options import ModelOption, OutFolder, UrlOption


def chat(model: ModelOption = None, url: UrlOption = None, out: OutFolder = Path("runs/chat")) -> None:
    """Talk to a model in the terminal; `/image FILE` and `/audio FILE` add media."""
    deferred.function("ernie_multi.chat", "run")(model=model, url=url, out=out)


def predict(
    text: Annotated[str | None, typer.Option("--text", "-t", help="Text of the question.")] = None,
    image: Annotated[Path | None, typer.Option("--image", "-i", exists=True, dir_okay=False)] = None,
    audio: Annotated[Path | None, typer.Option("--audio", "-a", exists=True, dir_okay=False)] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for a picture or sound of the answer.")
    ] = Path(),
    model: ModelOption = None,
    url: UrlOption = None,
) -> None:
    """Answer one question made of text, a picture and a sound."""
    inputs = {
        name: str(value)
        for name, value in (("text", text), ("image", image), ("audio", audio))
        if value is not None
    }
    if not inputs:
        raise InvalidInputError(
            "nothing to answer: give at least one of --text, --image, --audio", param="text"
        )
    prediction = ernie_multi.ErnieMulti(model=model, url=url).predict(inputs)
    if prediction.text:
        typer.echo(prediction.text)
    for medium, name in ((prediction.image, "answer.png"), (prediction.audio, "answer.wav")):
        if medium is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(medium)
            typer.echo(out / name)
