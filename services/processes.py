"""Supervised local processes of a run: start in order, wait until ready, restart, stop cleanly.

Each process has its log in ``RUN/logs/NAME.log`` and a record in ``RUN/processes/NAME.json``, so that
another command can show or stop what runs. Children die with their supervisor, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.services.child_process import start_child

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
_LOG_LIMIT = 16 << 20
_READY_POLL_S = 0.1
_WATCH_S = 0.2
_RESTART_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run.

    ``env`` is added to the supervisor's environment. ``ready`` is a URL that answers 2xx or a function that
    answers True; without it a process that lives counts as ready. ``port`` is shown in the status only.
    After an unasked end the process is started again up to ``restarts`` times.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: str | Callable[[], bool] | None = None
    ready_timeout_s: float = 120.0
    stop_timeout_s: float = 30.0
    port: int | None = None
    cwd: Path | None = None
    restarts: int = 0

    def __post_init__(self) -> None:
        if not self.name.replace("-", "_").isidentifier() or self.name == SUPERVISOR:
            raise InvalidInputError(f"process name {self.name!r} can't be used", param="name")
        if not self.argv:
            raise InvalidInputError(f"process {self.name!r} has no command", param="argv")


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process as its record tells: ``state`` is ``running``, ``starting``, ``ended`` or ``gone`` (its
    record is there, it isn't)."""

    name: str
    state: str
    pid: int
    port: int | None
    url: str | None
    log: str
    started_at: float
    restarts: int = 0
    exit_status: int | None = None


class Supervisor:
    """Runs the processes of a run folder; a context manager that stops them in reverse order of their start.

    Use it from the main thread: children are tied to the thread that starts them.
    """

    def __init__(self, run_folder: str | os.PathLike[str]) -> None:
        self.folder = Path(run_folder)
        self._records = self.folder / "processes"
        self._logs = self.folder / "logs"
        self._children: dict[str, _Child] = {}
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        try:
            for folder in (self._records, self._logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(f"run folder {self.folder} can't be used: {error}") from None
        other = _read_record(self._records / f"{SUPERVISOR}.json")
        if other is not None and _alive(other):
            raise UnavailableError(
                f"{self.folder} is run by process {other['pid']} already; stop it first (`ernie-multi down`)"
            )
        _stop_leftovers(self._records)
        _write_record(self._records / f"{SUPERVISOR}.json", _identity(os.getpid()))
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, specs: Iterable[ProcessSpec]) -> None:
        """Start processes one after another, each ready before the next.

        Raises:
            UnavailableError: one ended, or was not ready in time; the message has the end of its log. What
            was started
                before it keeps running until :meth:`stop`.
        """
        for spec in specs:
            with self._lock:
                if spec.name in self._children:
                    raise InvalidInputError(f"process {spec.name!r} runs already", param="name")
                child = _Child(spec, self._logs / f"{spec.name}.log", self._records / f"{spec.name}.json")
                self._children[spec.name] = child
                child.start(in_watcher=False)
            self._wait_ready(child)

    def _wait_ready(self, child: _Child) -> None:
        spec = child.spec
        deadline = time.monotonic() + spec.ready_timeout_s
        while not self._stopping.is_set():
            if child.ended():
                raise UnavailableError(
                    f"{spec.name} ended with status {child.exit_status} before it was ready; "
                    f"{child.last_words()}"
                )
            if child.is_ready():
                child.state = "running"
                child.record()
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{spec.name} was not ready within {spec.ready_timeout_s:.0f} s; {child.last_words()}"
                )
            time.sleep(_READY_POLL_S)
        raise UnavailableError(f"{spec.name} was stopped while it started")

    def _watch(self) -> None:
        """Notice unasked ends; restart where the spec says so."""
        # It stays until all are stopped, as the ones that it started again are tied to it.
        while not self._stopped.wait(_WATCH_S):
            if self._stopping.is_set():
                continue
            with self._lock:
                for child in self._children.values():
                    child.ended()
                    if child.restart_at is not None and time.monotonic() >= child.restart_at:
                        child.restart_at = None
                        # This thread lives as long as the supervisor, so the child may be tied to it.
                        child.start(in_watcher=True)
                        child.state = "running"
                        child.record()

    def ended(self) -> dict[str, int]:
        """Exit status of each process that has ended and will not be restarted."""
        with self._lock:
            return {
                name: child.exit_status
                for name, child in self._children.items()
                if child.ended() and child.restart_at is None and child.exit_status is not None
            }

    def status(self) -> list[ProcessStatus]:
        """All processes, in the order of their start."""
        with self._lock:
            return [child.status() for child in self._children.values()]

    def stop_process(self, name: str) -> int | None:
        """Stop one process (SIGTERM, wait, SIGKILL); its exit status."""
        with self._lock:
            child = self._children.pop(name, None)
        return None if child is None else child.stop()

    def stop(self) -> None:
        """Stop all processes, the last one started first."""
        self._stopping.set()
        for name in reversed(list(self._children)):
            self.stop_process(name)
        self._stopped.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        (self._records / f"{SUPERVISOR}.json").unlink(missing_ok=True)

    def run_until_signal(self) -> int | None:
        """Wait for SIGINT or SIGTERM, or until a process ends for good; that process's status, else None."""
        asked = threading.Event()
        previous = {
            number: signal.signal(number, lambda *_: asked.set())
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            while not asked.wait(_WATCH_S):
                if ended := self.ended():
                    return next(iter(ended.values()))
            return None
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _Child:
    """One process, its log and its record."""

    def __init__(self, spec: ProcessSpec, log: Path, record: Path) -> None:
        self.spec = spec
        self.log = log
        self.path = record
        self.state = "starting"
        self.exit_status: int | None = None
        self.restarts = 0
        self.restart_at: float | None = None
        self.started_at = 0.0
        self._asked_to_stop = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, in_watcher: bool) -> None:
        if self.log.exists() and self.log.stat().st_size > _LOG_LIMIT:
            self.log.replace(self.log.with_suffix(".log.1"))
        with open(self.log, "ab") as output:
            try:
                self._process = start_child(
                    self.spec.argv,
                    env={**os.environ, **self.spec.env},
                    cwd=self.spec.cwd,
                    output=output,
                    own_group=True,
                    tie=True if in_watcher else None,
                )
            except OSError as error:
                raise UnavailableError(f"{self.spec.name} can't be started: {error}") from None
        self.state, self.exit_status, self.started_at = "starting", None, time.time()
        self.record()

    def ended(self) -> bool:
        if self._process is None:
            return self.exit_status is not None
        status = self._process.poll()
        if status is None:
            return False
        if self.state == "running" and not self._asked_to_stop:
            logger.warning("%s ended with status %d; see %s", self.spec.name, status, self.log)
            if status != 0 and self.restarts < self.spec.restarts:
                self.restarts += 1
                self.restart_at = time.monotonic() + _RESTART_PAUSE_S * self.restarts
        self.exit_status, self.state = status, "ended"
        _kill_group(self._process.pid)
        self._process = None
        self.record()
        return True

    def is_ready(self) -> bool:
        ready = self.spec.ready
        if ready is None:
            return True
        if callable(ready):
            return bool(ready())
        try:
            with urllib.request.urlopen(ready, timeout=2.0) as answer:
                return 200 <= answer.status < 300
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def stop(self) -> int | None:
        self._asked_to_stop, self.restart_at = True, None
        process = self._process
        if process is not None and not self.ended():
            process.terminate()
            try:
                process.wait(self.spec.stop_timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not stop within %.0f s", self.spec.name, self.spec.stop_timeout_s)
                process.kill()
                process.wait()
            self.ended()
        self.path.unlink(missing_ok=True)
        return self.exit_status

    def last_words(self) -> str:
        with open(self.log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()[-5:]
        return f"the end of {self.log}: " + " / ".join(lines) if lines else f"{self.log} is empty"

    def status(self) -> ProcessStatus:
        self.ended()
        spec = self.spec
        return ProcessStatus(
            name=spec.name,
            state=self.state,
            pid=self._process.pid if self._process is not None else 0,
            port=spec.port,
            url=spec.ready if isinstance(spec.ready, str) else None,
            log=str(self.log),
            started_at=self.started_at,
            restarts=self.restarts,
            exit_status=self.exit_status,
        )

    def record(self) -> None:
        identity = _identity(self._process.pid) if self._process is not None else {}
        spec = self.spec
        known: dict[str, Any] = {
            "name": spec.name,
            "state": self.state,
            "pid": 0,
            "port": spec.port,
            "url": spec.ready if isinstance(spec.ready, str) else None,
            "log": str(self.log),
            "started_at": self.started_at,
            "restarts": self.restarts,
            "exit_status": self.exit_status,
        }
        _write_record(self.path, {**known, **identity})


def run_status(run_folder: str | os.PathLike[str]) -> list[ProcessStatus]:
    """The processes of a run folder as another command sees them, oldest first."""
    found = []
    for path in (Path(run_folder) / "processes").glob("*.json"):
        record = _read_record(path)
        if record is None or path.stem == SUPERVISOR:
            continue
        record.pop("born", None)
        status = ProcessStatus(**record)
        alive = status.pid and _alive(_read_record(path) or {})
        if not alive and status.state != "ended":
            status = ProcessStatus(**{**asdict(status), "state": "gone"})
        found.append(status)
    return sorted(found, key=lambda status: status.started_at)


def stop_run(run_folder: str | os.PathLike[str], *, timeout_s: float = 120.0) -> bool:
    """Stop the supervisor of a run folder, which stops its processes; False when none ran.

    Raises:
        UnavailableError: it did not end in time.
    """
    records = Path(run_folder) / "processes"
    path = records / f"{SUPERVISOR}.json"
    record = _read_record(path)
    ran = record is not None and _alive(record)
    if record is not None and ran:
        os.kill(record["pid"], signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while _alive(record):
            if time.monotonic() > deadline:
                raise UnavailableError(f"process {record['pid']} did not end within {timeout_s:.0f} s")
            time.sleep(_READY_POLL_S)
    left = _stop_leftovers(records)
    path.unlink(missing_ok=True)
    return ran or left


def _stop_leftovers(records: Path) -> bool:
    """End processes whose supervisor is gone; True when there were any."""
    found = False
    for path in records.glob("*.json"):
        record = _read_record(path)
        if path.stem == SUPERVISOR:
            continue
        if record is not None and record.get("pid") and _alive(record):
            found = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(record["pid"], signal.SIGTERM)
            deadline = time.monotonic() + 10.0
            while _alive(record) and time.monotonic() < deadline:
                time.sleep(_READY_POLL_S)
            _kill_group(record["pid"])
        path.unlink(missing_ok=True)
    return found


def _kill_group(leader: int) -> None:
    """End what a child has left behind in its own process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _identity(pid: int) -> dict[str, Any]:
    """A process by number and time of birth: numbers are used again."""
    return {"pid": pid, "born": _born(pid)}


def _born(pid: int) -> str | None:
    try:
        # Field 22 (start time in ticks since boot); the name in field 2 may hold spaces and brackets.
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[19]
        )
    except (OSError, IndexError):
        return None


def _alive(record: Mapping[str, Any]) -> bool:
    pid = record.get("pid")
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    stat = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):
        if stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "Z":
            return False
    return record.get("born") is None or record["born"] == _born(pid)


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(record, indent=1), encoding="utf-8")
    os.replace(draft, path)


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
