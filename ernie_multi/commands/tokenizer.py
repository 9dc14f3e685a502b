"""The commands `ernie-multi tokenizer`: recipes of the tokenizers, which take options of their own."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ernie_multi.commands import deferred
from ernie_multi.commands.options import OutFolder

app = typer.Typer(no_args_is_help=True, help="Train and measure the tokenizers.")


class Tokenizer(StrEnum):
    """A tokenizer that has a training recipe."""

    text = "text"
    audio = "audio"
    vision = "vision"
    video = "video"
    vit = "vit"


# (module, function) of each recipe; the function parses the arguments after the tokenizer's name.
_RECIPES: dict[tuple[str, Tokenizer], tuple[str, str]] = {
    ("train", Tokenizer.text): ("ernie5.tokenizers.text.train", "main"),
    ("train", Tokenizer.audio): ("ernie5.tokenizers.audio.train", "main"),
    ("train", Tokenizer.vision): ("ernie_multi.recipes.vision", "train"),
    ("train", Tokenizer.video): ("ernie_multi.recipes.video", "train"),
    ("train", Tokenizer.vit): ("ernie_multi.recipes.vit", "train"),
    ("evaluate", Tokenizer.text): ("ernie_multi.recipes.text", "evaluate"),
    ("evaluate", Tokenizer.audio): ("ernie5.tokenizers.audio.evaluation", "main"),
    ("evaluate", Tokenizer.vision): ("ernie_multi.recipes.vision", "evaluate"),
    ("evaluate", Tokenizer.video): ("ernie_multi.recipes.video", "evaluate"),
    ("evaluate", Tokenizer.vit): ("ernie_multi.recipes.vit", "evaluate"),
}
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def data(
    name: Annotated[Tokenizer, typer.Argument()],
    out: OutFolder,
    corpora: Annotated[
        str | None,
        typer.Option(
            "--corpora", help="Corpora to read, joined by commas. Default: those built for the recipe."
        ),
    ] = None,
) -> None:
    """Write the files that `tokenizer train` and `tokenizer evaluate` read, from built corpora."""
    chosen = [part.strip() for part in corpora.split(",") if part.strip()] if corpora is not None else None
    deferred.function("ernie_multi.tokenizer_data", "write")(name.value, out, corpora=chosen)


@app.command(context_settings=_PASS_ON)
def train(context: typer.Context, name: Annotated[Tokenizer, typer.Argument()]) -> None:
    """Train a tokenizer's weights; `ernie-multi tokenizer train NAME --help` lists the recipe's options."""
    _run_recipe("train", name, context.args)


@app.command(context_settings=_PASS_ON)
def evaluate(context: typer.Context, name: Annotated[Tokenizer, typer.Argument()]) -> None:
    """Measure a tokenizer on held-out media; `… evaluate NAME --help` lists the options."""
    _run_recipe("evaluate", name, context.args)


@app.command("import")
def import_(
    model: Annotated[Path, typer.Argument(help="A SentencePiece model, BPE or unigram.")],
    out: OutFolder,
    fallback: Annotated[
        str | None, typer.Option(help="Encoding of characters without a piece: utf-8 or utf-16be.")
    ] = None,
) -> None:
    """Make a SentencePiece model a text tokenizer that brings every text back, or say why not."""
    deferred.function("ernie_multi.recipes.text", "import_text")(model, out, fallback)


def _run_recipe(action: str, name: Tokenizer, arguments: list[str]) -> None:
    program = sys.argv
    sys.argv = [f"ernie-multi tokenizer {action} {name}", *arguments]
    try:
        deferred.function(*_RECIPES[action, name])()
    finally:
        sys.argv = program
