"""Supervised processes: order, readiness, logs, restarts, and nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.services.child_process import start_child
from ernie5.services.processes import ProcessSpec, Supervisor, run_status, stop_run
from tests.services.stream_helpers import wait_for

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def spec(name: str, program: str = SLEEP, *arguments: object, **options) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", program, *map(str, arguments)), **options)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_processes_start_in_order_and_stop_in_reverse(tmp_path):
    note = (
        "import signal, sys, time\n"
        "def leave(*_):\n"
        "    open(sys.argv[1], 'a').write('-' + sys.argv[2]); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "open(sys.argv[1], 'a').write('+' + sys.argv[2]); time.sleep(600)"
    )
    diary = tmp_path / "diary"
    with Supervisor(tmp_path / "run") as supervisor:
        supervisor.start(
            spec(
                name, note, diary, name, ready=lambda name=name: diary.exists() and name in diary.read_text()
            )
            for name in ("a", "b", "c")
        )
        assert [status.state for status in supervisor.status()] == ["running"] * 3
        assert [status.name for status in run_status(tmp_path / "run")] == ["a", "b", "c"]
    assert diary.read_text() == "+a+b+c-c-b-a"
    assert run_status(tmp_path / "run") == []


def test_a_url_says_when_a_process_is_ready(tmp_path):
    port = free_port()
    server = ProcessSpec(
        "web",
        (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"),
        env={"GREETING": "hello"},
        ready=f"http://127.0.0.1:{port}/",
        port=port,
    )
    with Supervisor(tmp_path) as supervisor:
        supervisor.start([server])
        (status,) = run_status(tmp_path)
        assert (status.state, status.port, status.url) == ("running", port, f"http://127.0.0.1:{port}/")
        environment = Path(f"/proc/{status.pid}/environ").read_bytes()
        assert b"GREETING=hello" in environment
        assert "GET / " in (tmp_path / "logs" / "web.log").read_text()


def test_a_process_that_ends_early_shows_its_last_words(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        with pytest.raises(UnavailableError, match=r"status 3 before it was ready.*no coffee"):
            supervisor.start(
                [spec("bad", "import sys; print('no coffee'); sys.exit(3)", ready=lambda: False)]
            )
        with pytest.raises(UnavailableError, match="not ready within 0 s"):
            supervisor.start([spec("slow", ready=lambda: False, ready_timeout_s=0.2)])
        with pytest.raises(UnavailableError, match="can't be started"):
            supervisor.start([ProcessSpec("none", ("/no/such/program",))])
    assert not (tmp_path / "processes" / "slow.json").exists()


def test_what_ignores_sigterm_is_killed_with_its_children(tmp_path):
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(600)"
    )
    note = tmp_path / "pid"
    with Supervisor(tmp_path) as supervisor:
        supervisor.start([spec("deaf", program, note, ready=lambda: note.exists() and note.read_text() != "",
                               stop_timeout_s=0.3)])  # fmt: skip
        grandchild = int(note.read_text())
        assert alive(grandchild)
    wait_for(lambda: not alive(grandchild), "the end of the grandchild")


def test_a_process_is_restarted_as_often_as_its_spec_says(tmp_path):
    count, go = tmp_path / "count", tmp_path / "go"
    program = (
        "import os, sys, time\n"
        "open(sys.argv[1], 'a').write('x')\n"
        "while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "sys.exit(1)"
    )
    with Supervisor(tmp_path) as supervisor:
        supervisor.start([spec("flaky", program, count, go, ready=count.exists, restarts=1), spec("calm")])
        go.touch()
        wait_for(lambda: supervisor.ended() == {"flaky": 1}, "the last end")
        assert count.read_text() == "xx"
        states = {status.name: (status.state, status.exit_status) for status in run_status(tmp_path)}
        assert states == {"flaky": ("ended", 1), "calm": ("running", None)}


def test_names_and_commands_are_checked(tmp_path):
    with pytest.raises(InvalidInputError, match="can't be used"):
        spec("../x")
    with pytest.raises(InvalidInputError, match="no command"):
        ProcessSpec("x", ())
    with Supervisor(tmp_path) as supervisor:
        supervisor.start([spec("one")])
        with pytest.raises(InvalidInputError, match="runs already"):
            supervisor.start([spec("one")])
        with pytest.raises(UnavailableError, match="run by process"), Supervisor(tmp_path):
            pass


SUPERVISOR = f"""
import sys
from ernie5.services.processes import ProcessSpec, Supervisor
with Supervisor(sys.argv[1]) as supervisor:
    supervisor.start([ProcessSpec(name, (sys.executable, "-c", {SLEEP!r})) for name in ("a", "b")])
    print("ready", flush=True)
    supervisor.run_until_signal()
"""


def start_supervisor(folder: Path) -> subprocess.Popen[bytes]:
    process = start_child([sys.executable, "-c", SUPERVISOR, str(folder)])
    wait_for(lambda: [s.state for s in run_status(folder)] == ["running"] * 2, "two running processes")
    return process


def test_another_command_shows_and_stops_a_run(tmp_path):
    supervisor = start_supervisor(tmp_path)
    pids = [status.pid for status in run_status(tmp_path)]
    assert stop_run(tmp_path)
    assert supervisor.wait(10) == 0
    assert not any(alive(pid) for pid in pids)
    assert run_status(tmp_path) == []
    assert not stop_run(tmp_path), "nothing is left to stop"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_supervisor_stops_all(tmp_path, number):
    supervisor = start_supervisor(tmp_path)
    pids = [status.pid for status in run_status(tmp_path)]
    supervisor.send_signal(number)
    assert supervisor.wait(10) == 0
    assert not any(alive(pid) for pid in pids)


def test_processes_die_with_a_killed_supervisor(tmp_path):
    supervisor = start_supervisor(tmp_path)
    pids = [status.pid for status in run_status(tmp_path)]
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids), "the end of the processes")
    assert {status.state for status in run_status(tmp_path)} == {"gone"}
    with Supervisor(tmp_path):
        assert run_status(tmp_path) == [], "what a dead supervisor left is cleared away"
