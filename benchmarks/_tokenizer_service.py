"""What a tokenizer service costs over the tokenizer itself, in processor time.

A batch goes to a service on Ray Serve as one request over a kept connection. Counted is the processor time of
everything on its way: the client's thread, the proxy and the whole replica, less what both use while nothing
is asked of them. A neighbour's load does not enter it, but it leaves out waiting; the wall time stands beside
it.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ernie5.protocol.samples import Segment
from ernie5.protocol.wire import TOKENS_CONTENT_TYPE, decode_spans
from ernie5.services.ray_environment import free_ports
from ernie5.services.ray_runtime import RayRuntime
from ernie5.services.tokenizer_service import application
from ernie5.services.tokenizer_settings import TokenizerServiceSettings

_SHORTEST_S = 0.2  # of a turn; shorter requests are repeated
_IDLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of processor time a batch, medians over the rounds; ``overhead`` is (service - alone) / alone.

    ``parts`` splits the service's time: client, proxy, replica.
    """

    alone_s: float
    service_s: float
    overhead: float
    extra_ms: float
    wall_ms: float
    parts: dict[str, float]


@contextmanager
def running(names: Sequence[str]) -> Iterator[str]:
    """The services on a Ray of their own, without a run; its address."""
    (port,) = free_ports(1)
    settings = TokenizerServiceSettings(port=port)
    with RayRuntime(settings) as runtime:
        runtime.deploy({name: application(name, settings) for name in names})
        yield runtime.url


def body_of(segments: Sequence[Segment]) -> bytes:
    """The JSON request of a batch: text as it is, files in base64."""
    items: list[dict[str, Any]] = []
    for segment in segments:
        if segment.text is not None:
            items.append({"modality": segment.modality, "text": segment.text})
        else:
            data = base64.b64encode(segment.data or b"").decode()
            items.append({"modality": segment.modality, "data": data, "content_type": segment.content_type})
    return json.dumps({"items": items}).encode()


def cost(
    url: str, name: str, segments: Sequence[Segment], alone: Callable[[], list[Any]], rounds: int
) -> Cost:
    """Measure a service against ``alone``, which tokenises the same segments in this process.

    Raises:
        RuntimeError: the service answers an error or other codes.
    """
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    body = body_of(segments)
    headers = {"Content-Type": "application/json", "Accept": TOKENS_CONTENT_TYPE}

    def ask() -> bytes:
        for last in (False, True):
            try:
                connection.request("POST", f"/{name}/v1/tokenize", body, headers)
                answer = connection.getresponse()
                data = answer.read()
                break
            except (ConnectionError, http.client.HTTPException):
                # The proxy closes connections that rest; on a busy machine a turn may take that long.
                connection.close()
                if last:
                    raise
        if answer.status != 200:
            raise RuntimeError(f"{name} answered {answer.status}: {data[:500]!r}")
        return data

    expected = [span.codes.tolist() for span in alone()]
    if [span.codes.tolist() for span in decode_spans(ask())] != expected:
        raise RuntimeError(f"{name}: the service's codes are not the tokenizer's")
    proxy, replica = _Processes("haproxy"), _Processes(f"ServeReplica:{name}:")
    started, before = time.perf_counter(), (proxy.seconds(), replica.seconds())
    time.sleep(_IDLE_S)
    idle_s = time.perf_counter() - started
    idle = [(now - then) / idle_s for now, then in zip((proxy.seconds(), replica.seconds()), before)]
    rows, walls = [], []
    for _ in range(rounds):
        alone_s, _ = _repeated(alone, time.thread_time)
        proxy_s, replica_s, started = proxy.seconds(), replica.seconds(), time.perf_counter()
        client_s, calls = _repeated(ask, time.thread_time, wall=True)
        took = time.perf_counter() - started
        proxy_s = max(proxy.seconds() - proxy_s - idle[0] * took, 0.0) / calls
        replica_s = max(replica.seconds() - replica_s - idle[1] * took, 0.0) / calls
        rows.append((alone_s, client_s, proxy_s, replica_s))
        walls.append(took / calls)
    connection.close()
    service_s = [sum(row[1:]) for row in rows]
    return Cost(
        alone_s=statistics.median(row[0] for row in rows),
        service_s=statistics.median(service_s),
        overhead=statistics.median((service - row[0]) / row[0] for service, row in zip(service_s, rows)),
        extra_ms=1e3 * statistics.median(service - row[0] for service, row in zip(service_s, rows)),
        wall_ms=1e3 * statistics.median(walls),
        parts={
            part: 1e3 * statistics.median(row[place] for row in rows)
            for place, part in ((1, "client"), (2, "proxy"), (3, "replica"))
        },
    )


def _repeated(
    call: Callable[[], object], clock: Callable[[], float], *, wall: bool = False
) -> tuple[float, int]:
    """Seconds of a call by ``clock``, and how many calls filled the turn (its wall time where ``wall``)."""
    until = time.perf_counter if wall else clock
    started, first, calls = clock(), until(), 0
    while calls == 0 or until() - first < _SHORTEST_S:
        call()
        calls += 1
    return (clock() - started) / calls, calls


class _Processes:
    """Children of this process whose command names ``mark``; their processor time to the nanosecond."""

    def __init__(self, mark: str) -> None:
        self._pids = []
        for child in psutil.Process(os.getpid()).children(recursive=True):
            try:
                if mark in child.name() or mark in " ".join(child.cmdline()):
                    self._pids.append(child.pid)
            except psutil.Error:
                continue
        if not self._pids:
            raise RuntimeError(f"no process of {mark} runs")

    def seconds(self) -> float:
        total = 0
        for pid in self._pids:
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                try:
                    total += int(path.read_text().split()[0])
                except (OSError, IndexError):
                    continue  # the thread has ended
        return total / 1e9
