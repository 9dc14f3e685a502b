"""`ernie-multi routing` on a small model and the corpus that ships."""

import json

import pytest

from ernie5.backbone.config import BackboneConfig, preset
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import save_model
from ernie_multi.cli import main
from ernie_multi.demo import tokenizer_hashes


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
