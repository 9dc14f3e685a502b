"""`ernie-multi up`, `status` and `down` on the real processes, with a small untrained model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from ernie_multi import ErnieMulti

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Stack:
    """A running stack: its folder, the gateway's address, and the processes that belong to it."""

    out: Path
    url: str
    tokenizers_url: str
    processes: list[psutil.Process]


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("REDIS_", "ERNIE_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "ernie_multi", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=environment,
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    torch = pytest.importorskip("torch")
    from ernie5.backbone.config import preset
    from ernie5.backbone.model.transformer import Backbone
    from ernie5.backbone.training.checkpoint import save_model
    from ernie5.services.tokenizer_service import load_tokenizer

    folder = tmp_path_factory.mktemp("stack")
    torch.manual_seed(0)
    hashes = {name: load_tokenizer(name).hash for name in ("text", "audio", "vision")}
    save_model(folder / "model", Backbone(preset("nano")), hashes)
    port, tokenizers_port = free_ports(2)
    out = folder / "run"
    ports = [f"--port={port}", f"--tokenizers-port={tokenizers_port}"]
    done = command("up", "--detach", f"--out={out}", f"--model={folder / 'model'}", *ports)
    assert done.returncode == 0, done.stderr + "".join(p.read_text()[-800:] for p in out.glob("logs/*.log"))
    running = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(out) in " ".join(process.info["cmdline"] or ())
    ]
    running += [child for process in running for child in process.children(recursive=True)]
    assert running
    try:
        yield Stack(out, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{tokenizers_port}", running)
    finally:
        command("down", f"--out={out}")


@pytest.mark.timeout(400)
def test_the_stack_answers_and_leaves_nothing(stack: Stack, tmp_path: Path) -> None:
    shown = command("status", f"--out={stack.out}").stdout
    assert all(name in shown for name in ("tokenizers", "inference", "gateway", "running", "stream: added 0"))

    for service in ("text", "audio", "vision"):
        ready = httpx.get(f"{stack.tokenizers_url}/{service}/ready", timeout=120).json()
        assert (ready["status"], ready["work"]["run"]) == ("ready", "run")

    picture, sound = ROOT / "examples" / "cat.jpg", ROOT / "examples" / "meow.wav"
    inputs = {"text": "What is this?", "image": str(picture), "audio": str(sound)}
    answer = ErnieMulti(url=stack.url).predict(inputs, max_tokens=8)
    assert answer.usage["prompt_tokens"] > 8 and answer.usage["completion_tokens"] >= 1
    assert answer.finish_reason in ("stop", "length")

    second = command("up", f"--out={stack.out}", f"--model={stack.out.parent / 'model'}")
    assert second.returncode == 1
    assert "ernie-multi down" in second.stderr and "Traceback" not in second.stderr

    assert command("down", f"--out={stack.out}").returncode == 0
    _, alive = psutil.wait_procs(stack.processes, timeout=20)
    assert not alive, [process.cmdline() for process in alive]
    assert "nothing runs" in command("status", f"--out={stack.out}").stdout


def test_a_missing_model_and_a_missing_gateway_say_what_helps(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    up = command("up", f"--out={tmp_path / 'run'}", f"--model={tmp_path}")
    assert up.returncode == 2 and "holds no model" in up.stderr
    asked = command("predict", f"--url=http://127.0.0.1:{port}", "--text=hello")
    assert asked.returncode == 1 and "does not answer" in asked.stderr
    assert asked.stderr.count("\n") == 1
