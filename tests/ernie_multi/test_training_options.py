"""The network of a training run: options of the command, and what is refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ernie5.backbone.config import PRESETS, preset
from ernie5.backbone.elastic.options import DRAWS, POLICIES, with_allocation, with_draws
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import save_model
from ernie5.protocol.errors import InvalidInputError
from ernie_multi import cli, networks, training
from ernie_multi.commands.training import Allocation, Draws


def test_the_command_offers_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(Draws) == DRAWS and tuple(Allocation) == POLICIES
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    said = " ".join(re.sub(r"[│|]", " ", capsys.readouterr().out).split())
    for name in (*PRESETS, *DRAWS, *POLICIES, "--mean-experts"):
        assert name in said, name


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object, **options: object) -> None:
        raise AssertionError("a process or a run was started")

    for name in ("redis_for", "Supervisor", "_train_here"):
        monkeypatch.setattr(training, name, started)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "options,message",
    [
        (["--elastic", "articel"], "articel"),
        (["--allocation", "some"], "some"),
        (["--preset", "huge"], "unknown preset 'huge'; known: nano, mini, base, report-16l"),
        (["--preset", "nano", "--elastic", "article"], "raise depth_range to 0.5"),
        (["--allocation", "threshold", "--mean-experts", "5"], "5 experts a token is outside [1, 4]"),
        (["--mean-experts", "2"], "gives every token 4 experts"),
        (["--mean-experts", "0.5"], "--mean-experts"),
        (["--init", "nowhere"], "nowhere"),
        (["--preset", "nano", "--init", "m"], "give one of them"),
    ],
)
def test_what_cannot_be_is_said_in_a_line_at_once(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--data", "mini", "--out", str(tmp_path / "run"), *options])
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().err).split())
    assert ended.value.code == 2 and message in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_run_gets_the_network_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = []

    def stop(*arguments: object, **options: object) -> None:
        seen.append(arguments[2])
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_train_here", stop)
    monkeypatch.setattr(training.Supervisor, "start", lambda self, specs: None)
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    options = ["--elastic", "report", "--allocation", "threshold", "--mean-experts", "3"]
    with pytest.raises(BaseException):  # noqa: B017 - typer turns the interrupt into an exit
        cli.main(["train", "--data", "mini", "--out", str(tmp_path / "run"), *options])
    assert seen == [with_allocation(with_draws(preset("mini"), "report"), "threshold", 3)]


def test_a_run_goes_on_with_the_network_of_its_checkpoint(tmp_path: Path) -> None:
    config = with_allocation(with_draws(preset("nano"), "report"), "null", 1.5)
    save_model(tmp_path, Backbone(config), {})
    assert networks.network_of(None, None, tmp_path) == config
    assert networks.network_of("nano", None, tmp_path, allocation="null") == config
    for options in ({"elastic": "off"}, {"allocation": "fixed"}, {"mean_experts": 1.2}):
        with pytest.raises(InvalidInputError, match="with its own"):
            networks.network_of(None, None, tmp_path, **options)
    with pytest.raises(InvalidInputError, match="with its own"):
        networks.network_of("mini", None, tmp_path)


@pytest.mark.parametrize("before,after", [("fixed", "null"), ("null", "fixed"), ("threshold", "null")])
def test_weights_of_another_allocation_begin_a_run(before: str, after: str, tmp_path: Path) -> None:
    parent = Backbone(with_allocation(preset("nano"), before), seed=5)
    save_model(tmp_path, parent, {})
    model = Backbone(networks.network_of(None, tmp_path, None, allocation=after), seed=6)
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    networks.take_weights(model, tmp_path)
    old = parent.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, old.get(name, fresh[name])), name
    with pytest.raises((InvalidInputError, RuntimeError)):
        networks.take_weights(Backbone(preset("mini")), tmp_path)
