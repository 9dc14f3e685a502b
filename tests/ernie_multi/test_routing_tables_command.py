"""`ernie-multi routing` on a small model and the corpus that ships."""

import json

import numpy as np
import pytest
import torch

from ernie5.backbone.config import BackboneConfig, preset
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.protocol.errors import InvalidInputError
from ernie_multi.cli import main
from ernie_multi.demo import tokenizer_hashes
from ernie_multi.routing import run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    router = {"allocation": {"policy": "threshold", "budget": 1.5}}
    config = BackboneConfig.model_validate(preset("nano").model_dump() | {"router": router})
    save_model(folder, Backbone(config), tokenizer_hashes())
    return folder


def test_it_prints_tables_and_writes_a_picture_and_figures(model, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["routing", str(model), "--out", str(tmp_path), "--samples", "24"])
    assert not ended.value.code
    said = " ".join(capsys.readouterr().out.split())
    for part in (
        "normalised entropy",
        "max/mean",
        "most used quarter",
        "text – audio",
        "experts a token against loss",
    ):
        assert part in said
    assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "routing.json").read_text())
    assert figures["groups"] == ["text", "image understanding", "image generation", "audio"]
    assert all(figures["tokens"]) and len(figures["use"][0]) == 4 and len(figures["use"][0][0]) == 8
    assert set(figures["rank_correlation"]) == {"text", "vision", "audio"}


def test_the_budget_is_fitted_to_half_of_the_rows_and_checked_on_the_others(tmp_path, capsys):
    router = {"allocation": {"policy": "threshold", "budget": 1.5}}
    config = BackboneConfig.model_validate(preset("nano").model_dump() | {"router": router})
    save_model(tmp_path / "model", Backbone(config), tokenizer_hashes())
    with pytest.raises(SystemExit) as ended:
        main(["routing", str(tmp_path / "model"), "--out", str(tmp_path), "--samples", "80", "--fit-budget"])
    assert not ended.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert "budget of 1.5 experts a token fitted to" in said
    fitted, _ = load_model(tmp_path / "model")
    assert not torch.equal(fitted.feed_forward(0).price_limit, Backbone(config).feed_forward(0).price_limit)
    figures = json.loads((tmp_path / "routing.json").read_text())
    counts, tokens = np.array(figures["experts_per_token"]), np.array(figures["tokens"])
    assert (counts * tokens[:, None]).sum() / tokens.sum() / 4 == pytest.approx(1.5, rel=0.05)
    save_model(tmp_path / "fixed", Backbone(preset("nano")), tokenizer_hashes())
    with pytest.raises(InvalidInputError, match="no budget to fit"):
        run(tmp_path / "fixed", tmp_path, fit_budget=True)
    with pytest.raises(InvalidInputError, match="budget is that of the whole model"):
        run(tmp_path / "model", tmp_path, depth=0.5, fit_budget=True)


def test_a_model_of_other_tokenizers_is_refused_with_the_reason(tmp_path, capsys):
    save_model(tmp_path / "foreign", Backbone(preset("nano")), tokenizer_hashes() | {"audio": "0" * 32})
    with pytest.raises(SystemExit) as ended:
        main(["routing", str(tmp_path / "foreign"), "--out", str(tmp_path), "--samples", "2"])
    assert ended.value.code == 2
    assert "trained with audio tokenizer 000000000000" in capsys.readouterr().err


def test_mistakes_are_told_in_one_line(model, tmp_path, capsys):
    for arguments, expected in (
        (["--top-k", "9"], "9 experts a token"),
        (["--split", "middle"], "'middle'"),
        (["--data", "nothing-here"], "nothing-here"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["routing", str(model), "--out", str(tmp_path), "--samples", "2", *arguments])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert expected in said and len(said.strip().splitlines()) == 1
