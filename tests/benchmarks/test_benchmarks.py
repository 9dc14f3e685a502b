"""Each benchmark runs to its end on the smallest sizes; its last line has the documented keys."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def last_line(script: str, *options: str) -> dict[str, Any]:
    """The JSON of a run with one thread in a process of its own."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--tiny", "--threads", "1", *options],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["machine"]["torch"] and result["machine"]["threads"] == 1
    return result


@pytest.mark.slow
def test_attention_reports_every_figure() -> None:
    result = last_line("attention.py", "--rounds", "1")
    figures = result["document_causal"]["256"]
    for key in (
        "flex_fp32",
        "flex_bf16",
        "flex_with_mask_bf16",
        "flex_with_eager_mask_bf16",
        "sdpa_dense_fwdbwd",
        "sdpa_causal_fwdbwd",
        "plan_ms",
        "gemm_peak_fraction_fp32",
        "gemm_peak_fraction_bf16",
        "peak_mb",
        "flex_peak_mb",
    ):
        assert figures[key] is not None and math.isfinite(figures[key]), (key, figures["left_out"])
    assert result["growth"]["longest_peak_mb"] > 0
    assert {point["length"] for point in result["growth"]["points"]} == {64, 128, 256, 512}


@pytest.mark.slow
def test_training_step_reports_every_arm() -> None:
    pytest.importorskip("transformers", reason="transformers is in the bench extra")
    result = last_line("training_step.py", "--bf16", "always", "--rounds", "1")
    assert result["vs_dense_mask"] > 0
    for arm in ("fp32", "bf16_masters", "bf16_pure"):
        figures = result["width_64"][arm]
        assert figures["left_out"] == {}
        for key in (
            "tokens_per_s",
            "gemm_peak_fraction",
            "vs_transformers",
            "vs_transformers_packed",
            "vs_transformers_eager",
            "vs_dense_mask",
            "vs_naive",
        ):
            assert figures[key] > 0, (arm, key)
