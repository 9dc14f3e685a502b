"""The one Ray that the tokenizer services share, and how it ends.

A runtime starts a private Ray on this machine, or joins one by its address, and puts applications behind one
HTTP address. Ray Serve drops requests in flight when it is shut down, but waits for them when an application
is deleted; so stopping deletes the applications first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ernie5.protocol.errors import UnavailableError
from ernie5.services.ray_environment import RayFolders, prepare
from ernie5.services.tokenizer_settings import TokenizerServiceSettings

if TYPE_CHECKING:
    import psutil

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


class RayRuntime:
    """A context manager: Ray and Ray Serve run inside it and nothing is left after it."""

    def __init__(self, settings: TokenizerServiceSettings) -> None:
        self.settings = settings
        self._folders: RayFolders | None = None
        self._deployed: list[str] = []
        self._own = settings.ray_address is None

    @property
    def url(self) -> str:
        host = self.settings.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.settings.port}"

    def __enter__(self) -> RayRuntime:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start Ray (or join it) and its HTTP address.

        Raises:
            UnavailableError: the port is taken, or Ray does not start.
        """
        if self._own:
            _require_free(self.settings.host, self.settings.port)
            self._folders = RayFolders.make()
        prepare(self._folders)
        from ray import serve
        from ray.serve.config import HTTPOptions

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
        if self._own:
            assert self._folders is not None
            # Replicas ask for a tenth of a CPU each, so the number is a label for Ray, not a limit.
            cpus = self.settings.ray_cpus or max(4, os.cpu_count() or 1)
            options |= {
                "address": "local",
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(self._folders.root),
                "include_dashboard": False,
                "num_cpus": cpus,
                "object_store_memory": self.settings.object_store_bytes,
            }
        else:
            options["address"] = self.settings.ray_address
        try:
            self._init(options)
            self._link_logs()
            serve.start(http_options=HTTPOptions(host=self.settings.host, port=self.settings.port))
        except Exception as error:
            self.stop()
            raise UnavailableError(f"Ray did not start: {error}") from error

    def _init(self, options: dict[str, Any]) -> None:
        """``ray.init``, again where a busy machine kept Ray from starting within its 30 s."""
        import ray

        for left in reversed(range(_ATTEMPTS if self._own else 1)):
            try:
                ray.init(namespace="ernie-multi", **options)
                return
            except Exception as error:
                ray.shutdown()
                _end(_processes_of(self._folders), grace_s=0.0)
                if not left:
                    raise
                logger.warning("Ray did not start (%s); trying again", error)

    def deploy(self, applications: Mapping[str, Any]) -> None:
        """Run applications, each at ``/name``, all at once, and wait until they are ready.

        Raises:
            UnavailableError: one of them does not start.
        """
        from ray import serve

        self._deployed += applications
        targets = [
            serve.RunTarget(application, name=name, route_prefix=f"/{name}")
            for name, application in applications.items()
        ]
        try:
            serve.run_many(targets)
        except RuntimeError as error:
            raise UnavailableError(f"{', '.join(applications)} did not start: {error}") from error

    def stop(self) -> None:
        """Drain and end everything that this runtime started; safe to call twice."""
        import ray

        processes = _processes_of(self._folders)
        if ray.is_initialized():
            from ray import serve

            with ThreadPoolExecutor(max(len(self._deployed), 1)) as pool:
                for waited in [pool.submit(serve.delete, name) for name in self._deployed]:
                    if (error := waited.exception()) is not None:
                        logger.warning("an application could not be drained: %s", error)
            self._deployed.clear()
            if self._own:
                _hush()
                with contextlib.suppress(Exception):
                    serve.shutdown()
            ray.shutdown()
        _end(processes)
        self._keep_logs()

    def _link_logs(self) -> None:
        """While Ray runs, its logs are seen through a link in the run's folder."""
        if self.settings.run_dir is None or self._folders is None:
            return
        logs = self.settings.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        link = logs / "ray"
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(self._folders.root / "session_latest" / "logs")

    def _keep_logs(self) -> None:
        """Move the services' own logs into the run's folder and remove Ray's files."""
        if self._folders is None:
            return
        if self.settings.run_dir is not None:
            link = self.settings.run_dir / "logs" / "ray"
            source = self._folders.root / "session_latest" / "logs" / "serve"
            if link.is_symlink():
                link.unlink()
            if source.is_dir():
                shutil.copytree(source, link, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        shutil.rmtree(self._folders.root, ignore_errors=True)
        self._folders = None


def _require_free(host: str, port: int) -> None:
    """A clear error before half a minute of starting Ray is spent on a port that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnavailableError(
                f"{host}:{port} can't be used: {error.strerror}; choose another with --port", param="port"
            ) from None


def _hush() -> None:
    """Keep Ray from printing that its controller was killed, which is how Ray Serve ends."""
    # Ray has no public switch for messages of this kind; without this one they are ugly, not harmful.
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


def _processes_of(folders: RayFolders | None) -> list[psutil.Process]:
    """The processes of our own Ray: those that name its folder, and everything below them."""
    import psutil

    found: dict[int, psutil.Process] = {}
    if folders is None:
        return []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(str(folders.root) in part for part in child.cmdline()):
                found |= {process.pid: process for process in (child, *child.children(recursive=True))}
    return list(found.values())


def _end(processes: list[psutil.Process], grace_s: float = 10.0) -> None:
    """Wait for processes to end by themselves, then end what is left of them."""
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)
