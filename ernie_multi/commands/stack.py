"""Commands that run processes: one service, or the whole stack on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ernie5.protocol.errors import InvalidInputError
from ernie_multi.commands import deferred
from ernie_multi.commands.options import ModelOption, OutFolder, RedisUrl, RunName


class Service(StrEnum):
    """A process of the stack."""

    text = "text"
    audio = "audio"
    vision = "vision"
    ingest = "ingest"
    trainer = "trainer"
    inference = "inference"
    gateway = "gateway"


_TOKENIZERS = (Service.text, Service.audio, Service.vision)
# (module, function) that runs each of the others until it is told to stop. Each reads its settings from the
# environment, which the options below write to, so that child processes and replicas see them too.
_PROCESSES: dict[Service, tuple[str, str]] = {
    Service.ingest: ("ernie_multi.runners", "run_ingest"),
    Service.trainer: ("ernie_multi.training", "run_trainer"),
    Service.inference: ("ernie_multi.runners", "run_inference"),
    Service.gateway: ("ernie5.services.gateway", "run_gateway"),
}


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
        deferred.function("ernie5.services.tokenizer_service", "run_services")([name.value for name in names])
    elif len(names) == 1:
        deferred.function(*_PROCESSES[names[0]])()
    else:
        together = ", ".join(_TOKENIZERS)
        raise InvalidInputError(
            f"only {together} run in one process; start the others one by one", param="names"
        )


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
    deferred.function("ernie_multi.stack", "up")(
        out, port=port, tokenizers_port=tokenizers_port, model=model, detach=detach
    )


def down(out: OutFolder = Path("runs/local")) -> None:
    """Stop what `up` started: finish the requests in flight, leave no process."""
    deferred.function("ernie_multi.stack", "down")(out)


def status(out: OutFolder = Path("runs/local")) -> None:
    """Show the processes of `up`: state, address, log, and the stream's figures."""
    deferred.function("ernie_multi.stack", "status")(out)


def _set_environment(values: Mapping[str, object]) -> None:
    """Set the variables of the options that were given; child processes inherit them."""
    for name, value in values.items():
        if value is not None:
            os.environ[name] = str(value)
