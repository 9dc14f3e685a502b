"""The stack as local processes: what `ernie-multi up`, `down` and `status` do.

One process each for the tokenizers (on one Ray), the inference worker and the gateway, and a Redis unless
``REDIS_URL`` names one. The supervisor starts them in order, each ready before the next, and stops them in
reverse; logs lie in ``RUN/logs``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ernie5.protocol.errors import UnavailableError
from ernie5.services.processes import ProcessSpec, Supervisor, run_status, stop_run
from ernie_multi.models import MODEL_VARIABLE, find_model

TOKENIZERS_PORT = 8000
GATEWAY_PORT = 8080
_READY_S = 300.0


def command_of(*services: str) -> tuple[str, ...]:
    """The command that runs a service, or several tokenizers, in a process of its own."""
    return (sys.executable, "-m", "ernie_multi", "service", *services)


def free_port() -> int:
    """A TCP port of the loopback interface that nothing uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def specs(run: str, redis_url: str, model: Path, *, port: int, tokenizers_port: int) -> list[ProcessSpec]:
    """The processes of the stack, in the order of their start."""
    shared = {"REDIS_URL": redis_url, "ERNIE_MULTI_RUN": run, "ERNIE_MULTI_STREAM_RUN": run}
    tokenizers = f"http://127.0.0.1:{tokenizers_port}"
    return [
        ProcessSpec(
            "tokenizers",
            command_of("text", "audio", "vision"),
            env={**shared, "ERNIE_MULTI_SERVICE_PORT": str(tokenizers_port)},
            # The last one to be deployed.
            ready=f"{tokenizers}/vision/ready",
            ready_timeout_s=_READY_S,
            port=tokenizers_port,
            restarts=3,
        ),
        ProcessSpec(
            "inference", command_of("inference"), env={**shared, MODEL_VARIABLE: str(model)}, restarts=3
        ),
        ProcessSpec(
            "gateway",
            command_of("gateway"),
            env={
                **shared,
                "ERNIE_MULTI_GATEWAY_PORT": str(port),
                "ERNIE_MULTI_GATEWAY_TOKENIZERS_URL": tokenizers,
            },
            # Ready when an inference worker has announced itself, too.
            ready=f"http://127.0.0.1:{port}/ready",
            ready_timeout_s=_READY_S,
            port=port,
            restarts=3,
        ),
    ]


@contextmanager
def redis_for(folder: Path) -> Iterator[str]:
    """The address of ``REDIS_URL``, else that of a server whose data lie in ``folder/redis``."""
    named = os.environ.get("REDIS_URL")
    if named:
        yield named
        return
    from ernie5.services.redis_server import start_server

    with start_server(folder / "redis") as server:
        yield server.url


def up(
    out: Path,
    *,
    port: int | None = None,
    tokenizers_port: int | None = None,
    model: Path | None = None,
    detach: bool = False,
) -> None:
    """Run the stack until Ctrl-C; with ``detach`` leave it running in the background once it is ready.

    Raises:
        InvalidInputError: there is no model to serve.
        UnavailableError: a process did not come up; the message has the end of its log.
    """
    chosen = find_model(model)
    if detach:
        _detached(out, port, tokenizers_port, chosen)
        return
    console = Console(stderr=True)
    with redis_for(out) as redis_url, Supervisor(out) as supervisor:
        parts = specs(
            out.resolve().name,
            redis_url,
            chosen,
            port=GATEWAY_PORT if port is None else port,
            tokenizers_port=TOKENIZERS_PORT if tokenizers_port is None else tokenizers_port,
        )
        for part in parts:
            with console.status(f"starting {part.name} (log: {out / 'logs' / part.name}.log)"):
                supervisor.start([part])
            console.print(f"{part.name} is ready{f' on port {part.port}' if part.port else ''}")
        console.print(f"[bold]http://127.0.0.1:{parts[-1].port}/v1[/] serves {chosen}; Ctrl-C stops all")
        ended = supervisor.run_until_signal()
        if ended is not None:
            raise UnavailableError(f"a process ended with status {ended}; its log lies in {out / 'logs'}")
        console.print("stopping: finishing requests")


def _detached(out: Path, port: int | None, tokenizers_port: int | None, model: Path) -> None:
    """Start `up` in a session of its own and wait until all of its processes run."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    log = out / "logs" / "supervisor.log"
    options = [f"--out={out}", f"--model={model}"]
    options += [f"--port={port}"] if port is not None else []
    options += [f"--tokenizers-port={tokenizers_port}"] if tokenizers_port is not None else []
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ernie_multi", "up", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while {part.name: part.state for part in run_status(out)}.get("gateway") != "running":
            if process.poll() is not None:
                last = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
                raise UnavailableError(f"the stack did not come up: {''.join(last)} ({log})")
            time.sleep(0.2)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    status(out)


def down(out: Path) -> None:
    """Stop the stack of a run folder: requests in flight finish, no process is left."""
    if stop_run(out):
        print(f"stopped what ran in {out}")
    else:
        print(f"nothing runs in {out}")


def status(out: Path) -> None:
    """Print the processes of a run folder, and the figures of its streams where its Redis answers."""
    processes = run_status(out)
    if not processes:
        print(f"nothing runs in {out}")
        return
    table = Table("process", "state", "pid", "port", "restarts")
    table.add_column("log", overflow="fold")
    for process in processes:
        port = "" if process.port is None else str(process.port)
        table.add_row(process.name, process.state, str(process.pid), port, str(process.restarts), process.log)
    Console().print(table)
    _print_stream(out)


def _print_stream(out: Path) -> None:
    from ernie5.services.redis_client import connect
    from ernie5.services.redis_server import running_url
    from ernie5.services.streams import RunStream

    url = os.environ.get("REDIS_URL") or running_url(out / "redis")
    if url is None:
        return
    try:
        figures = RunStream(connect(url), out.resolve().name).stats()
    except UnavailableError as error:
        print(f"Redis does not answer: {error.message}")
        return
    shown = ("added", "published", "consumed", "lag", "untrimmed", "tombstones", "dead", "used_memory")
    print("stream: " + ", ".join(f"{name} {figures[name]}" for name in shown))
