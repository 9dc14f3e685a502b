"""A text service that scales, in a process of its own: ``PORT RUN_DIR``; stopped by a signal.

Its tokenizer counts in Redis how often it makes each text (hash ``made``), and waits while the key ``closed``
is there.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from ernie5.protocol.settings import load_settings
from ernie5.services.ray_runtime import RayRuntime
from ernie5.services.redis_client import connect
from ernie5.services.tokenizer_service import application
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from tests.services.stream_helpers import ByteTokenizer


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        super().__init__("text")
        self.client = connect()

    def encode_segments(self, segments, **options):
        while self.client.exists("closed"):
            self.client.blpop("opened", timeout=1)
        for segment in segments:
            self.client.hincrby("made", segment.text, 1)
        return super().encode_segments(segments, **options)


def main() -> None:
    port, run_dir = sys.argv[1:]
    overrides = {
        "port": int(port),
        "run_dir": Path(run_dir),
        "work_batch_size": 4,
        "text": {"max_replicas": 2},
        "scaling": {
            "entries_per_replica": 16,
            "up_after_s": 0.5,
            "down_after_s": 1.0,
            "report_every_s": 0.5,
        },
    }
    settings = load_settings(TokenizerServiceSettings, overrides=overrides)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with RayRuntime(settings) as runtime:
        runtime.deploy({"text": application("text", settings, CountingTokenizer)})
        print("ready", flush=True)
        while not stop.wait(0.5):
            pass


if __name__ == "__main__":
    main()
