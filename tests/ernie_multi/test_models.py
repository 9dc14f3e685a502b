"""Which model is taken when none, a run or a folder is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ernie5.protocol.errors import InvalidInputError
from ernie_multi.models import find_model


def make(folder: Path, age: int) -> Path:
    """A model's files, written ``age`` seconds ago."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
        os.utime(folder / name, ns=(0, (2_000_000_000 - age) * 10**9))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make(tmp_path / "runs" / "old" / "model", 300)
    make(tmp_path / "runs" / "demo" / "checkpoints" / "step-00000100", 200)
    make(tmp_path / "runs" / "demo" / "checkpoints" / "step-00000200", 100)
    make(tmp_path / "runs" / "demo" / "checkpoints" / ".step-00000300.77", 0)
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path / "runs"


def test_the_newest_of_all_runs_unless_named(runs: Path) -> None:
    assert find_model(runs=runs, environ={}) == runs / "demo" / "checkpoints" / "step-00000200"
    assert find_model(runs / "old", runs=runs, environ={}) == runs / "old" / "model"
    first = runs / "demo" / "checkpoints" / "step-00000100"
    assert find_model(first, runs=runs, environ={}) == first


def test_the_argument_goes_before_the_environment(runs: Path) -> None:
    environ = {"ERNIE_MULTI_MODEL": str(runs / "old")}
    assert find_model(runs=runs, environ=environ) == runs / "old" / "model"
    assert find_model(runs / "demo", runs=runs, environ=environ).name == "step-00000200"
    assert find_model(runs=runs, environ={"ERNIE_MULTI_MODEL": ""}).name == "step-00000200"


def test_errors_say_where_and_what_helps(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="make demo"):
        find_model(runs=tmp_path / "none", environ={})
    with pytest.raises(InvalidInputError, match=r"empty holds no model"):
        find_model(runs / "empty", runs=runs, environ={})
    with pytest.raises(InvalidInputError, match="ERNIE_MULTI_MODEL"):
        find_model(runs=runs, environ={"ERNIE_MULTI_MODEL": str(tmp_path / "gone")})
