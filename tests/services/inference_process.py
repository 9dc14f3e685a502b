"""An inference worker in a process of its own, for tests that kill it: ``URL NAME STEP_SECONDS``."""

from __future__ import annotations

import signal
import sys
import threading

from ernie5.services.inference import InferenceSettings, InferenceWorker
from ernie5.services.redis_client import connect
from tests.services.echo_engine import EchoEngine
from tests.services.generation_helpers import INFO, TEXT_SIZE


def main() -> None:
    url, name, step_s = sys.argv[1:4]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    settings = InferenceSettings(claim_after_s=0.5, heartbeat_s=0.1, drain_timeout_s=0.0)
    engine = EchoEngine(TEXT_SIZE, step_s=float(step_s))
    InferenceWorker(engine, connect(url), INFO, settings, name).run(stop)


if __name__ == "__main__":
    main()
