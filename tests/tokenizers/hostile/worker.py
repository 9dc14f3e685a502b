"""A process that tokenises what it is sent, as a service's replica does, with a bound on its memory.

``python -m tests.tokenizers.hostile.worker SERVICE`` reads frames from its standard input and answers each by
a line of JSON. :class:`Worker` is the other side, which stops it where an item takes too long.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).parents[3]
# Address space beyond what the loaded tokenizer has: a picture at the limit of 64 million pixels needs some
# of it; what unfolds without a bound ends here, not in the machine's memory.
HEADROOM = 3 << 30
START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of an item.

    Attributes:
        outcome: ``tokens`` or ``refused``.
        codes: digest of the codes; empty where refused.
        error: class name of the error, and ``message`` its reason.
        status: HTTP status of the error.
        seconds: it took.
        peak: bytes that the process's memory grew at most meanwhile.
    """

    outcome: str
    codes: str = ""
    error: str = ""
    message: str = ""
    status: int = 0
    seconds: float = 0.0
    peak: int = 0


class Worker:
    """One process with one service's tokenizer."""

    def __init__(self, service: str) -> None:
        self.service = service
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tokenizers.hostile.worker", service],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
        )
        assert self._process.stdout is not None
        self._answers: BinaryIO = self._process.stdout  # type: ignore[assignment]
        self.modalities: list[str] = json.loads(self._line(START_SECONDS))["modalities"]

    def tokenise(
        self, modality: str, data: bytes, content_type: str | None = None, *, timeout: float = 60.0
    ) -> Reply:
        """The worker's reply; ``AssertionError`` where it dies, or takes longer than ``timeout`` seconds."""
        head = json.dumps({"modality": modality, "content_type": content_type}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(struct.pack("<II", len(head), len(data)) + head + data)
        self._process.stdin.flush()
        return Reply(**json.loads(self._line(timeout)))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self, timeout: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(timeout):
                self.close()
                raise AssertionError(f"the {self.service} worker did not answer within {timeout:.0f} s")
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            raise AssertionError(f"the {self.service} worker died (exit {code})")
        return line


def main(service: str) -> None:
    # What libraries print must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    from ernie5.protocol.errors import ErnieMultiError
    from ernie5.protocol.samples import Segment
    from ernie5.tokenizers.modalities import with_modalities
    from ernie5.tokenizers.modalities.bases import load_base

    tokenizer = with_modalities(service, load_base(service))
    if sys.platform == "linux":
        limit = _status("VmSize") + HEADROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answers.write(json.dumps({"modalities": tokenizer.modalities}).encode() + b"\n")
    source = sys.stdin.buffer
    while sizes := source.read(8):
        head_size, size = struct.unpack("<II", sizes)
        head, data = json.loads(source.read(head_size)), source.read(size)
        _reset_peak()
        before, start = _status("VmRSS"), time.monotonic()
        (result,) = tokenizer.encode_segments([Segment(data=data, **head)], features=False)
        said = {"seconds": time.monotonic() - start, "peak": max(0, _status("VmHWM") - before)}
        if isinstance(result, ErnieMultiError):
            said |= {
                "outcome": "refused",
                "error": type(result).__name__,
                "message": result.message,
                "status": result.status,
            }
        else:
            codes = hashlib.sha256(str(result.codes.shape).encode() + result.codes.tobytes())
            said |= {"outcome": "tokens", "codes": codes.hexdigest()}
        answers.write(json.dumps(said).encode() + b"\n")


def _status(field: str) -> int:
    """A size of ``/proc/self/status`` in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


def _reset_peak() -> None:
    """Let VmHWM start anew from the present size, where the kernel lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(sys.argv[1])
