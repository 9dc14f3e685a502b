"""A tokenizer replica as a process of its own, for tests that kill it.

Usage: worker_process.py URL RUN SERVICE MARKER. It writes the file MARKER when it has its first batch in
hand. The payload ``poison`` kills it, ``stuck`` keeps it busy for ever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ernie5.services.redis_client import connect
from ernie5.services.streams import TokenStream
from ernie5.services.worker import drain
from tests.services.stream_helpers import ByteTokenizer


class FatefulTokenizer(ByteTokenizer):
    def __init__(self, service: str, marker: Path) -> None:
        super().__init__(service)
        self.marker = marker

    def encode_segments(self, segments, **options):
        self.marker.touch()
        for segment in segments:
            if segment.payload == b"poison":
                os.kill(os.getpid(), signal.SIGKILL)
            if segment.payload == b"stuck" and not self.marker.with_suffix(".freed").exists():
                threading.Event().wait()
        return super().encode_segments(segments, **options)


def main() -> None:
    url, run, service, marker = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stream = TokenStream(connect(url), run, claim_idle_ms=200)
    drain(FatefulTokenizer(service, Path(marker)), stream, stop, 16, features=False, block_ms=20)


if __name__ == "__main__":
    main()
