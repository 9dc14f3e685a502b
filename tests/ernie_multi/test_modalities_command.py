"""`ernie-multi modalities`: lists what there is, measures it, and fails where a round trip does."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.modalities import MODALITIES, modality_of
from ernie5.tokenizers.modalities import BUILT_IN, Registry
from ernie_multi import cli, modalities


def only(*names: str) -> Registry:
    return Registry({name: BUILT_IN[name] for name in names}, {})


def test_the_list_names_every_modality_with_layout_and_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["modalities", "--no-measure", "--json"])
    assert not ended.value.code
    rows = json.loads(capsys.readouterr().out)["modalities"]
    assert [row["modality"] for row in rows if row["built_in"]] == list(MODALITIES)
    for row in rows:
        modality = modality_of(row["modality"])
        assert (row["layout"], row["service"], row["round_trip"]) == (modality.layout, modality.service, None)
        assert row["sample"]["source"] and row["sample"]["licence"]


def test_figures_are_measured_on_the_samples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modalities, "load_registry", lambda: only("table", "track"))
    modalities.show(as_json=True)
    table, track = json.loads(capsys.readouterr().out)["modalities"]
    assert table["round_trip"]["value"] == 0 and table["round_trip"]["passed"]
    assert 0 < track["round_trip"]["value"] < 1 and track["round_trip"]["unit"] == "m"
    monkeypatch.setenv("COLUMNS", "250")
    modalities.show()
    assert "largest distance" in capsys.readouterr().out


def test_a_round_trip_that_fails_and_a_broken_plugin_fail_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lossy(type(BUILT_IN["table"])):  # type: ignore[misc]
        def to_text(self, value: Any) -> str:
            return super().to_text(value[:-1])

    registry = Registry({"table": Lossy()}, {"smell": "modality plug-in 'smell' can't be imported"})
    monkeypatch.setattr(modalities, "load_registry", lambda: registry)
    with pytest.raises(InvalidInputError, match=r"'smell' can't be imported; table: cells that differ inf"):
        modalities.show()
    assert "table" in capsys.readouterr().out


def test_a_missing_package_is_named_in_the_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(service: str) -> SimpleNamespace:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(modalities, "load_registry", lambda: only("depth"))
    monkeypatch.setattr(modalities, "load_base", absent)
    modalities.show(as_json=True)
    (row,) = json.loads(capsys.readouterr().out)["modalities"]
    assert row["problem"] == "torch is not installed: pip install 'ernie-multi[vision]'"
