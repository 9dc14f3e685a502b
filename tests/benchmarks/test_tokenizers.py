"""The tokenizers' benchmark: rivals compared at equal bits, never extrapolated; a tiny run goes through."""

from __future__ import annotations

import base64
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ernie5.protocol.samples import Segment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS = (
    "modalities",
    "image_psnr",
    "image_bpp",
    "jpeg_psnr_same_bpp",
    "webp_psnr_same_bpp",
    "speech_recognised_ratio",
)
BY_MODALITY = ("items_per_s", "mb_per_s", "decoded_items_per_s", "batch_gain", "container_share")


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _tokenizer_data

    return _tokenizer_data


def test_a_rival_is_interpolated_between_its_rates_only(data: ModuleType) -> None:
    curve = data.Curve(bpp=[0.8, 1.2], payload_bpp=[0.2, 0.6], psnr=[20.0, 24.0], header=300.0)
    assert curve.at(1.0, payload=False) == pytest.approx(22.0)
    assert curve.at(0.3, payload=True) == pytest.approx(21.0)
    assert curve.at(0.3, payload=False) is None, "the codec cannot go so low with its header"
    assert curve.at(0.7, payload=True) is None


def test_rivals_rise_with_their_bits_and_their_headers_count(data: ModuleType) -> None:
    drawings = data.pictures(4).labels
    for kind, least in (("JPEG", 250), ("WEBP", 30)):
        curve = data.curve(kind, drawings)
        assert curve.bpp == sorted(curve.bpp) and curve.header > least
        assert curve.psnr[-1] > curve.psnr[0] + 5
        gaps = np.subtract(curve.bpp, curve.payload_bpp)
        assert (gaps > 8 * least / 64**2).all()
    assert data.psnr(drawings[0], drawings[0]) == pytest.approx(100)
    assert data.psnr(np.zeros((2, 2), np.uint8), np.full((2, 2), 255, np.uint8)) == pytest.approx(0, abs=1e-6)


def test_held_out_media_come_from_the_corpus_that_ships(
    data: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ERNIE_MULTI_DATA", str(tmp_path))
    drawings = data.pictures(5)
    assert drawings.source == "mini, 5 held-out drawings"
    assert {picture.shape for picture in drawings.labels} == {(64, 64, 3)}
    digits = data.spoken_digits(40)
    assert len(digits.segments) == 40 and set(digits.labels) <= set(range(10))
    assert len(set(digits.labels)) > 5


def test_a_request_holds_what_the_segments_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _tokenizer_service import body_of

    segments = [Segment(modality="text", text="a"), Segment(modality="image", data=b"\0\1")]
    first, second = json.loads(body_of(segments))["items"]
    assert first == {"modality": "text", "text": "a"}
    assert base64.b64decode(second["data"]) == b"\0\1"


def last_line(*options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "tokenizers.py", "--tiny", *options],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_a_tiny_run_reports_every_figure() -> None:
    result = last_line("--without-service")
    assert result["modalities"] >= 12
    for key in KEYS:
        assert result[key] is not None and math.isfinite(result[key]), key
    assert result["image_bpp"] == pytest.approx(0.332, abs=1e-3)
    for key in BY_MODALITY:
        assert {"text", "image", "speech", "table"} <= set(result[key]), key
        assert all(value >= 0 for value in result[key].values()), key
    assert all(value is not None and value < 4096 for value in result["peak_mb_per_item"].values())


@pytest.mark.slow
def test_a_tiny_run_measures_the_services() -> None:
    pytest.importorskip("ray", reason="ray is in the service extra")
    result = last_line()
    assert set(result["service_overhead"]) == {"image", "speech"}
    assert result["text_overhead_ms"] is not None
