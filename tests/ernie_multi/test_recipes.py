"""The command that a card of weights records is one that others can repeat."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from ernie5.protocol.errors import InvalidInputError
from ernie_multi.recipes import vision
from ernie_multi.recipes.output import command_line, show

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "arguments,recorded",
    [
        (
            ["--data", "/home/me/vision", "--minutes", "4.5", "--resume"],
            "--data vision --minutes 4.5 --resume",
        ),
        (["--data=/home/me/vision/", "--out", "runs/a/run 1"], "--data=vision --out 'run 1'"),
        (["--data", ".", "--init", "../old/video.safetensors"], "--data . --init video.safetensors"),
    ],
)
def test_paths_are_recorded_without_their_folders(arguments: list[str], recorded: str) -> None:
    assert command_line("ernie-multi tokenizer train vision", arguments) == (
        f"ernie-multi tokenizer train vision {recorded}"
    )


def test_without_arguments_the_process_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--out", "/tmp/run"])
    assert command_line("train", None) == "train --out run"


def test_figures_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show({"psnr": 28.5}, tmp_path / "new" / "figures.json")
    assert json.loads(capsys.readouterr().out) == {"psnr": 28.5}
    assert json.loads((tmp_path / "new" / "figures.json").read_text()) == {"psnr": 28.5}


def test_a_folder_of_pictures_is_measured(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("cat.jpg", "more/again.jpg"):
        shutil.copyfile(EXAMPLES / "cat.jpg", tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    out = tmp_path / "figures.json"
    vision.evaluate(["--pictures", str(tmp_path), "--out", str(out)])
    figures = json.loads(out.read_text())
    assert (figures["pictures"], figures["refused"]) == (1, 1)
    assert 10 < figures["16"]["psnr"] <= figures["24"]["psnr"] < 40
    with pytest.raises(InvalidInputError, match="holds no picture"):
        vision.evaluate(["--pictures", str(tmp_path / "none")])
