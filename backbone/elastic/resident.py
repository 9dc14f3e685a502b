"""Resident memory of model folders, measured in a process of its own.

``python -m ernie5.backbone.elastic.resident`` reads a JSON object a line, the fields of
:class:`ResidentRequest`, and answers each with a line of figures, see :class:`ResidentMeter`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ernie5.protocol.errors import ErnieMultiError, UnavailableError

_SMAPS = Path("/proc/self/smaps_rollup")


@dataclass(frozen=True)
class ResidentRequest:
    """A model folder; with ``tokens`` that many positions of text run through the sub-network asked for.

    ``expert_memory`` in bytes leaves the experts in the file, see :mod:`ernie5.backbone.inference.offload`.
    """

    folder: str
    expert_memory: int | None = None
    depth: float | None = None
    width: float | None = None
    top_k: int | None = None
    tokens: int = 0


class ResidentMeter:
    """A child process that loads models, one after the other; to be used in a ``with`` block.

    Raises:
        UnavailableError: the system has no ``/proc``.
    """

    def __init__(self) -> None:
        if not _SMAPS.exists():
            raise UnavailableError("resident memory is read from /proc, which this system lacks")
        # Blocks of their own for all but small tensors, so that freed memory goes back to the system.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> ResidentMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()

    def measure(self, request: ResidentRequest) -> dict[str, int]:
        """Bytes above the child's baseline: ``loaded`` is the growth of its resident set (pages of mapped
        files included) after loading, ``ran`` after running ``tokens`` positions.

        Raises:
            UnavailableError: the child fails; the message is its last words.
        """
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asdict(request)), file=self._child.stdin, flush=True)
        line = self._child.stdout.readline()
        if not line:
            words = self._child.communicate()[1].strip()[-500:]
            raise UnavailableError(f"the process that measures memory failed: {words}")
        figures: dict[str, int] = json.loads(line)
        return figures


def resident_bytes() -> int:
    """The resident set of this process, freed memory returned first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in _SMAPS.read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise UnavailableError(f"{_SMAPS} tells no resident set")


def measure(request: ResidentRequest) -> dict[str, int]:
    """Load a model in this process, run it, forget it."""
    from ernie5.backbone.elastic.subnetwork import choose_subnetwork
    from ernie5.backbone.inference.offload import load_offloaded
    from ernie5.backbone.training.checkpoint import load_model

    baseline = resident_bytes()
    folder = Path(request.folder)
    if request.expert_memory is None:
        model, _ = load_model(folder)
    else:
        model, _ = load_offloaded(folder, request.expert_memory)
    figures = {"loaded": resident_bytes() - baseline}
    if request.tokens:
        _run(model, choose_subnetwork(model, request.depth, request.width, request.top_k), request.tokens)
        figures["ran"] = resident_bytes() - baseline
    return figures


def _run(model: Any, subnetwork: Any, tokens: int) -> None:
    """Positions of random text, one row."""
    import numpy as np
    import torch

    from ernie5.backbone.elastic.calibration import calibration_batches
    from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan

    size = model.config.text_vocabulary
    codes = np.random.default_rng(0).integers(0, size, tokens).astype(np.int32)
    segment = TokenSegment(TokenSpan("text", SequenceLayout(size), codes, ""), "target")
    (batch,) = calibration_batches([TokenSequence("text", (segment,))], model.config, row_length=tokens + 8)
    with torch.inference_mode():
        model(batch, layers=subnetwork.layers, routing=subnetwork.routing())


def main() -> None:
    """Measure each request of the standard input."""
    import torch

    from ernie5.backbone.config import preset
    from ernie5.backbone.elastic.subnetwork import whole
    from ernie5.backbone.model.transformer import Backbone

    torch.set_num_threads(1)
    # What torch sets up at its first use belongs to the baseline.
    warm = Backbone(preset("nano")).eval()
    _run(warm, whole(warm.config), 64)
    del warm
    try:
        for line in sys.stdin:
            print(json.dumps(measure(ResidentRequest(**json.loads(line)))), flush=True)
    except ErnieMultiError as error:
        raise SystemExit(error.message) from None


if __name__ == "__main__":
    main()
