"""The ``ernie-multi`` command: puts the commands together and says what went wrong.

A mistake of the user or a missing peer ends in one line on stderr and exit code 2 or 1; only faults of this
program show a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import ernie_multi
from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie_multi.commands import answers, corpus, deferred, models, stack, tokenizer, training

app = typer.Typer(
    name="ernie-multi",
    help="One model that understands and generates text, images and audio: train it, serve it, talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of `--help`.
for command in (
    *(stack.service, stack.up, stack.down, stack.status),
    *(training.train, training.demo),
    *(answers.chat, answers.predict),
    *(models.routing, models.export, models.elastic, models.grow, models.export_hf, models.import_hf),
):
    app.command()(command)
app.command("import", hidden=True)(models.import_hf)  # the shorter name
app.add_typer(corpus.app, name="corpus")
app.add_typer(tokenizer.app, name="tokenizer")

# The extra of this distribution that brings a package, for the message when it is missing.
_EXTRAS = {
    "torch": "train",
    "safetensors": "train",
    "matplotlib": "train",
    "tensorboard": "train",
    "ray": "serve",
    "fastapi": "serve",
    "uvicorn": "serve",
    "redis": "serve",
    "prometheus_client": "serve",
    "psutil": "serve",
    "sentencepiece": "text",
    "soundfile": "audio",
    "scipy": "audio",
    "av": "audio",
    "PIL": "vision",
}


@app.command()
def modalities(
    measure: Annotated[bool, typer.Option(help="Send each one's sample through its tokenizer.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the modalities, plug-ins too: layout, service and what a round trip of their sample keeps."""
    deferred.function("ernie_multi.modalities", "show")(measure=measure, as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(ernie_multi.__version__)


def _explained(error: Exception) -> tuple[str, int] | None:
    """Message and exit code for an error that is not a fault of this program."""
    if isinstance(error, ErnieMultiError):
        return error.message, 2 if isinstance(error, InvalidInputError) else 1
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if package in _EXTRAS:
            return f"{package} is not installed: pip install 'ernie-multi[{_EXTRAS[package]}]'", 1
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", 1
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    # Threads that spin at barriers starve the other processes of a stack that shares the cores. OpenMP reads
    # this when torch is loaded, so it must be set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="ernie-multi")
    except Exception as error:
        explained = _explained(error)
        if explained is None:
            raise
        message, code = explained
        print(f"ernie-multi: {message}", file=sys.stderr)
        raise SystemExit(code) from None


if __name__ == "__main__":
    main()
