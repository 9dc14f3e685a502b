"""Protects the services as they run: on Ray Serve, over sockets, with a work stream, killed, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.protocol.samples import Sample, Segment
from ernie5.protocol.wire import TOKENS_CONTENT_TYPE
from ernie5.services.ray_environment import free_ports
from ernie5.services.redis_client import connect
from ernie5.services.redis_server import start_server
from ernie5.services.streams import TokenStream
from ernie5.services.tokenizer_service import load_tokenizer, run_service
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from tests.services.generation_helpers import until
from tests.services.media_files import png, tone

ROOT = Path(__file__).parents[2]
MEDIA = {
    "text": ("Hello, 世界!".encode(), "text/plain"),
    "audio": (tone(), "audio/wav"),
    "vision": (png(), "image/png"),
}


@dataclass
class Running:
    process: psutil.Popen
    url: str
    run_dir: Path
    stream: TokenStream

    def replica(self, name: str) -> psutil.Process | None:
        """The process of a service's replica, once Ray has given it its title."""
        for process in self.process.children(recursive=True):
            try:
                if f"ServeReplica:{name}:" in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                continue
        return None

    def answers(self, name: str) -> bool:
        data, content_type = MEDIA[name]
        try:
            response = httpx.post(
                f"{self.url}/{name}/v1/tokenize",
                content=data,
                headers={"Content-Type": content_type},
                timeout=30,
            )
        except httpx.TransportError:
            return False
        return response.status_code == 200


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    run_dir = tmp_path_factory.mktemp("run")
    (port,) = free_ports(1)
    with start_server(tmp_path_factory.mktemp("work-redis")) as server:
        command = [sys.executable, "-m", "tests.services.tokenizer_services_process", str(port), str(run_dir)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ERNIE_MULTI_RUN": "test",
            "REDIS_URL": server.url,
        }
        with open(run_dir / "output.txt", "wb") as output:
            process = psutil.Popen(
                [*command, *MEDIA], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        stream = TokenStream(connect(server.url), "test")
        services = Running(process, f"http://127.0.0.1:{port}", run_dir, stream)

        def ready() -> bool:
            text = (run_dir / "output.txt").read_text()
            assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, text
            return text.count("tokenizer ready at") == len(MEDIA)

        try:
            until(ready, "the services are ready", 200)
            yield services
        finally:
            # Ended already where the last test ran.
            if process.poll() is None:
                left = process.children(recursive=True)
                process.terminate()
                psutil.wait_procs([process], timeout=60)
                for child in (process, *left):
                    if child.is_running():
                        child.kill()


@pytest.mark.parametrize("name", MEDIA)
def test_each_service_answers_as_its_tokenizer_does(running: Running, name: str) -> None:
    data, content_type = MEDIA[name]
    with httpx.Client(base_url=f"{running.url}/{name}", timeout=60) as client:
        response = client.post("/v1/tokenize", content=data, headers={"Content-Type": content_type})
        assert response.status_code == 200, response.text
        (span,) = response.json()["spans"]
        modality = {"text": "text", "audio": "speech", "vision": "image"}[name]
        segment = Segment(modality=modality, data=data, content_type=content_type)
        (expected,) = load_tokenizer(name).encode_segments([segment], features=False)
        assert span["codes"] == expected.codes.tolist()  # type: ignore[union-attr]
        accept = {"Content-Type": content_type, "Accept": TOKENS_CONTENT_TYPE}
        wire = client.post("/v1/tokenize", content=data, headers=accept)
        back = client.post(
            "/v1/detokenize", content=wire.content, headers={"Content-Type": TOKENS_CONTENT_TYPE}
        )
        assert back.status_code == 200
        assert back.headers["content-type"].startswith(content_type)
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").json()["service"] == name
        assert f'service="{name}"' in client.get("/metrics").text
        assert "/v1/tokenize" in client.get("/openapi.json").json()["paths"]
        assert client.get("/docs").status_code == 200
        refused = client.post("/v1/tokenize", content=b"", headers={"Content-Type": content_type})
        assert refused.status_code == 422
        chunked = client.post("/v1/tokenize", content=iter([b"x" * (1 << 20)] * 65))
        assert chunked.status_code in (413, 415)


def test_the_text_service_has_no_torch(running: Running) -> None:
    replica = running.replica("text")
    assert replica is not None
    assert not [entry.path for entry in replica.memory_maps() if "torch" in entry.path]
    vision = running.replica("vision")
    assert vision is not None
    assert [entry.path for entry in vision.memory_maps() if "torch" in entry.path]


def test_http_listens_on_loopback_only(running: Running) -> None:
    open_addresses = set()
    for process in running.process.children(recursive=True):
        if "haproxy" in process.name():
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    open_addresses.add(connection.laddr.ip)
    assert open_addresses == {"127.0.0.1"}


def test_the_work_stream_is_drained(running: Running) -> None:
    segments = (
        Segment(modality="image", data=png(), content_type="image/png"),
        Segment(modality="text", text="What is this?"),
        Segment(modality="text", text="a gradient", role="target"),
    )
    for position in range(3):
        running.stream.add_sample(0, position, Sample(segments=segments), length=3)
    tokens = running.stream.keys.tokens
    until(lambda: running.stream.client.xlen(tokens) == 3, "three published samples", 60)
    work = httpx.get(f"{running.url}/vision/ready").json()["work"]
    assert (work["run"], work["status"]) == ("test", "draining")
    assert work["entries"] >= 1


@pytest.mark.parametrize("name", ["text", "vision"])
def test_a_killed_replica_comes_back(running: Running, name: str) -> None:
    killed = running.replica(name)
    assert killed is not None
    killed.kill()
    until(lambda: not killed.is_running(), "the replica is dead")
    until(lambda: running.answers(name), "the service answers again", 90)
    replica = running.replica(name)
    assert replica is not None and replica.pid != killed.pid
    assert running.answers("audio")


def test_a_taken_port_is_a_clear_error(running: Running) -> None:
    port = int(running.url.rsplit(":", 1)[1])
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{port} can't be used"):
        run_service("text", TokenizerServiceSettings(port=port))


def test_an_unknown_service_is_a_clear_error() -> None:
    with pytest.raises(InvalidInputError, match="known: text, audio, vision"):
        run_service("smell", TokenizerServiceSettings())


def test_ctrl_c_finishes_requests_and_leaves_no_process(running: Running) -> None:
    children = running.process.children(recursive=True)
    assert len(children) > 5
    # A replica was replaced before: for a moment two proxies share the port, one of which knows no replica.
    until(lambda: all(running.answers("vision") for _ in range(20)), "the service answers steadily", 60)
    broken: list[str] = []
    served = 0
    stopping = threading.Event()

    def ask() -> None:
        nonlocal served
        data, content_type = MEDIA["vision"]
        with httpx.Client(timeout=60) as client:
            while True:
                try:
                    response = client.post(
                        f"{running.url}/vision/v1/tokenize",
                        content=data,
                        headers={"Content-Type": content_type, "Connection": "close"},
                    )
                except httpx.ConnectError:
                    return
                except httpx.TransportError as error:
                    broken.append(repr(error))
                    return
                if response.status_code != 200:
                    # The address is gone already; before the signal every request must succeed.
                    if not stopping.is_set() or response.status_code not in (404, 500, 503):
                        broken.append(f"{response.status_code} {response.text}")
                    return
                served += 1

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: served > 10, "requests are served")
    stopping.set()
    running.process.send_signal(signal.SIGINT)
    for thread in threads:
        thread.join(60)
    assert running.process.wait(60) == 0
    assert not broken
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    output = (running.run_dir / "output.txt").read_text()
    assert "Traceback" not in output
    assert "stopped" in output
    assert list((running.run_dir / "logs" / "ray").glob("replica_text*"))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) != 0
