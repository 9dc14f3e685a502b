"""Tokenizer services in a process of their own: ``PORT RUN_DIR SERVICE...``; stopped by a signal."""

from __future__ import annotations

import sys
from pathlib import Path

from ernie5.protocol.settings import load_settings
from ernie5.services.tokenizer_service import run_services
from ernie5.services.tokenizer_settings import TokenizerServiceSettings


def main() -> None:
    port, run_dir, *names = sys.argv[1:]
    overrides = {"port": int(port), "run_dir": Path(run_dir), "work_batch_size": 4}
    run_services(names, load_settings(TokenizerServiceSettings, overrides=overrides))


if __name__ == "__main__":
    main()
