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


def test_arms_of_a_seed_can_be_run_one_by_one(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import elastic

    before = {"seed": 0, "arms": {"fixed": 1, "elastic": 2}, "machine": "old", "latency": {"k1": 3}}
    alone = {"seed": 0, "arms": {"small-k1": 4}, "machine": "new"}
    after = elastic.joined(before, alone)
    assert after == before | {"arms": {"fixed": 1, "elastic": 2, "small-k1": 4}}
    timed = {"seed": 0, "arms": {"elastic": 5}, "machine": "new", "latency": {"k1": 6}}
    assert elastic.joined(after, timed) == timed | {"arms": after["arms"] | {"elastic": 5}}
    assert elastic.joined(None, alone) == alone


def test_networks_trained_alone_are_as_small_as_the_sub_models(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import elastic
    from _elastic_arms import ARMS, network_of
    from _elastic_evaluation import SUBMODELS

    whole = network_of(ARMS["fixed"])
    for name, arm in elastic.SMALL.items():
        layers, experts, top_k = SUBMODELS[name]
        network = network_of(ARMS[arm])
        wanted = (layers or whole.layers, experts or whole.experts, top_k or whole.top_k)
        assert (network.layers, network.experts, network.top_k) == wanted, name


@pytest.mark.slow
def test_a_tiny_run_goes_through(tmp_path):
    result = last_line("--tiny", "--seed", "99", "--work", str(tmp_path))
    assert result["fresh"]["seed"] == 99 and 99 not in result["seeds"]
    for key in KEYS:
        assert key in result["fresh"], key
