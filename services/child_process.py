"""Child processes that can't outlive their parent.

On Linux the kernel is asked to signal the child when the parent's thread ends
(``prctl(PR_SET_PDEATHSIG)``), so even ``kill -9`` of the parent leaves nothing behind; elsewhere an exit
hook has to do. The child sets this up itself, in a tiny interpreter that then becomes the wanted program:
code run between fork and exec of a process with threads may deadlock.

The signal follows the *thread* that started the child, so by default only children of the main thread are
tied; a thread that lives as long as its process may ask for it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_BECOME = """
import ctypes, os, signal, sys
parent, number = int(sys.argv[1]), int(sys.argv[2])
ctypes.CDLL(None, use_errno=True).prctl(1, number, 0, 0, 0)
if os.getppid() != parent:
    sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""

_living: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def start_child(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    output: IO[bytes] | int | None = None,
    own_group: bool = False,
    death_signal: int = signal.SIGTERM,
    tie: bool | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``argv``; it gets ``death_signal`` when this process dies.

    ``env`` is the whole environment (default: this process's). Stdin is empty; stdout and stderr both go to
    ``output``. With ``own_group`` a Ctrl-C in the terminal does not reach the child, so its parent decides
    when it stops.

    Raises:
        OSError: the program is not there or can't be run.
    """
    command = list(argv)
    search = None if env is None else env.get("PATH")
    if os.sep not in command[0] and shutil.which(command[0], path=search) is None:
        raise FileNotFoundError(f"program {command[0]!r} is not on the PATH")
    if os.sep in command[0] and cwd is None and not os.access(command[0], os.X_OK):
        raise FileNotFoundError(f"program {command[0]!r} does not exist or can't be run")
    if tie is None:
        tie = threading.current_thread() is threading.main_thread()
    if tie and sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), str(int(death_signal)), *argv]
    child = subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=own_group,
    )
    _living.add(child)
    return child


def stop_child(child: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> int:
    """SIGTERM, wait up to ``grace_s``, then SIGKILL; the exit status."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return child.returncode


@atexit.register
def _stop_all() -> None:
    for child in list(_living):
        if child.poll() is None:
            child.terminate()
