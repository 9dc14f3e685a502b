"""The demo of a few steps: the whole path from raw media to a report, as a user runs it."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ernie_multi import ErnieMulti


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "run"
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    command = [sys.executable, "-m", "ernie_multi", "demo", "--quick", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(out / "report.html") in done.stderr.replace("\n", "")
    return out


@pytest.mark.timeout(700)
def test_it_leaves_figures_and_a_report_and_no_process(demo):
    figures = json.loads((demo / "figures.json").read_text())
    for name in (
        "digit_read",
        "digit_heard",
        "digit_drawn",
        "digit_spoken",
        "emoji_name_en",
        "emoji_name_zh",
    ):
        assert 0 <= figures[name] <= 1 and figures[f"{name}_n"] > 0 and figures[f"{name}_source"]
    for name in ("digit_heard", "digit_drawn", "digit_spoken"):
        assert 0 <= figures[f"{name}_judge"] <= 1
    assert figures["steps"] == 6
    report = (demo / "report.html").read_text()
    assert report.count("data:image/png;base64,") >= 3 and "data:audio/" in report
    picture = report.split("data:image/png;base64,")[1].split("'")[0]
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    left = [p for p in psutil.process_iter(["cmdline"]) if str(demo) in " ".join(p.info["cmdline"] or [])]
    assert not left


def test_the_articles_snippet_runs_as_printed(demo, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERNIE_MULTI_MODEL", str(demo))
    model = ErnieMulti()
    inputs = {"text": "这是一只猫", "image": "cat.jpg", "audio": "meow.wav"}
    output = model.predict(inputs)
    assert isinstance(output.text, str)
    # The picture, the sound and the text all reached the model.
    assert output.usage["prompt_tokens"] > 16 + 5


def test_a_second_run_reuses_the_model(demo):
    before = (demo / "step-00000006" / "model.safetensors").stat().st_mtime_ns
    command = [sys.executable, "-m", "ernie_multi", "demo", "--quick", "--out", str(demo)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "asking it again" in done.stderr
    assert (demo / "step-00000006" / "model.safetensors").stat().st_mtime_ns == before
