"""The elastic benchmark: figures follow from scores, committed seeds report, a tiny run goes through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS = [
    f"{prefix}{name}"
    for prefix in ("", "fixed_")
    for name in (
        "retention_keep5of8",
        "retention_keep3of8",
        "retention_half_width",
        "retention_k1",
        "loss_half_width",
        "loss_k1",
    )
] + ["full_loss_ratio", "k1_expert_latency_gain", "k1_latency_gain"]


def last_line(*options: str, timeout: float = 280) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "elastic.py", *options],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_committed_seeds_have_every_figure():
    result = last_line("--report")
    assert len(result["seeds"]) >= 3 and result["fresh"] is None
    for key in KEYS:
        values = [figures[key] for figures in result["by_seed"].values()]
        assert result[key] == pytest.approx(sum(values) / len(values), abs=2e-3), key


def test_figures_follow_from_the_scores(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import elastic

    def scores(full: float, cut: float, rise: float) -> dict[str, Any]:
        whole = {"digits": full, "captions": full / 2, "text": 4.0}
        less = {"digits": cut, "captions": cut / 2, "text": 4.0 * (1 + rise)}
        return {"full": whole, **dict.fromkeys(elastic.SUBMODELS, less)}

    arms = {
        "elastic": {"scores": scores(0.8, 0.76, 0.01)},
        "fixed": {"scores": scores(0.8, 0.4, 0.1)},
    }
    arms["elastic"]["scores"]["full"]["text"] = 4.2
    figures = elastic.figures_of({"arms": arms, "latency": {"k1_latency_gain": 0.3}})
    assert figures["retention_keep5of8"] == pytest.approx(0.95)
    assert figures["fixed_retention_keep5of8"] == pytest.approx(0.5)
    assert figures["fixed_loss_k1"] == pytest.approx(0.1)
    assert figures["full_loss_ratio"] == pytest.approx(1.05)
    assert figures["k1_latency_gain"] == 0.3
    mean = elastic.mean_of([figures, figures | {"retention_keep5of8": 0.85}])
    assert mean["retention_keep5of8"] == pytest.approx(0.9)
    assert mean["retention_keep5of8_gain"] == pytest.approx(0.4)


@pytest.mark.slow
def test_a_tiny_run_goes_through(tmp_path):
    result = last_line("--tiny", "--seed", "99", "--work", str(tmp_path))
    assert result["fresh"]["seed"] == 99 and 99 not in result["seeds"]
    for key in KEYS:
        assert key in result["fresh"], key
