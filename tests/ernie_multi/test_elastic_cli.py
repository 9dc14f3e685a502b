"""`ernie-multi export` and `ernie-multi elastic` on a small model, with the shipped corpus and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ernie5.backbone.config import preset
from ernie5.backbone.elastic.calibration import measure_loss
from ernie5.backbone.elastic.subnetwork import SubNetwork
from ernie5.backbone.elastic.surface import Grid
from ernie5.backbone.inference.offload import OffloadedBackbone, parse_bytes
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError
from ernie_multi import ErnieMulti, cli, elastic
from ernie_multi.client import shipped_example
from ernie_multi.demo import tokenizer_hashes
from ernie_multi.local import LocalModel

TASKS = "digit_read,speech_say,text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parent")
    save_model(path, Backbone(preset("nano"), seed=3).eval(), tokenizer_hashes())
    return path


def test_export_writes_a_model_that_answers(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "part"
    elastic.export(folder, out, depth=0.5, experts=0.5, top_k=1, tasks=TASKS, samples=2)
    part, hashes = load_model(out)
    assert (part.config.layers, part.config.experts, part.config.top_k) == (2, 4, 1)
    assert hashes == tokenizer_hashes()
    assert (out / "model.safetensors").stat().st_size < (folder / "model.safetensors").stat().st_size
    # It is the masked parent with the layers and experts that the folder tells.
    told = json.loads((out / elastic.PROVENANCE).read_text())
    parent = LocalModel(folder)
    experts: list[tuple[int, ...] | None] = [None] * 4
    for layer, ids in zip(told["layers"], told["experts"]):
        experts[layer] = tuple(ids)
    subnetwork = SubNetwork(tuple(told["layers"]), tuple(experts), told["top_k"])
    batches = elastic.batches_of(parent, elastic.open_tasks("mini", "test", TASKS), samples=2, seed=9)
    assert measure_loss(part, batches) == measure_loss(parent.model, batches, subnetwork)
    inputs = {"image": shipped_example("cat.jpg"), "text": "What is this?"}
    answer = ErnieMulti(out).predict(inputs, max_tokens=5, modalities=("text",))
    assert answer.usage["completion_tokens"] > 0


def test_the_same_seed_exports_the_same_model(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        elastic.export(folder, tmp_path / name, depth=0.75, experts=0.5, tasks="text", samples=2, seed=4)
    first, second = (load_model(tmp_path / name)[0].state_dict() for name in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tuning_lowers_the_loss_on_its_data_and_keeps_the_configuration(folder: Path, tmp_path: Path) -> None:
    losses = {}
    for name, steps in (("plain", 0), ("tuned", 4)):
        out = tmp_path / name
        elastic.export(folder, out, depth=0.5, top_k=1, tasks="text", samples=2, tune=steps)
        model = LocalModel(out)
        batches = elastic.batches_of(model, elastic.open_tasks("mini", "train", "text"), samples=8, seed=1)
        losses[name] = measure_loss(model.model, batches).total
        assert model.model.config.elastic == preset("nano").elastic
    assert losses["tuned"] < losses["plain"]


def test_the_surface_marks_what_nothing_beats(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ernie5.backbone.elastic.surface.default_grid", lambda config: Grid((4, 2), (8, 4), (2, 1))
    )
    plot = tmp_path / "surface.png"
    elastic.elastic(folder, tasks="text", samples=2, as_json=True, plot=plot)
    told = json.loads(capsys.readouterr().out)
    points = {(p["layers"], p["experts"], p["top_k"]): p for p in told["points"]}
    assert len(points) == 8
    assert plot.read_bytes().startswith(b"\x89PNG")
    whole, least = points[4, 8, 2], points[2, 4, 1]
    state = Backbone(preset("nano")).state_dict()
    assert whole["weight_bytes"] == sum(value.nbytes for value in state.values())
    assert least["weight_bytes"] < whole["weight_bytes"]
    assert least["resident_bytes"] < whole["resident_bytes"]
    assert least["active_parameters"] < points[2, 4, 2]["active_parameters"] < least["parameters"]
    assert all(point["decode_ms"] > 0 and point["prefill_ms"] > 0 for point in points.values())
    costs = {key: (p["loss"], p["resident_bytes"], p["answer_ms"]) for key, p in points.items()}
    for key, point in points.items():
        beaten = any(
            other != costs[key] and all(a <= b for a, b in zip(other, costs[key])) for other in costs.values()
        )
        assert point["pareto"] != beaten
    # As a table, from the command line.
    monkeypatch.setattr("ernie5.backbone.elastic.surface.default_grid", lambda config: Grid((2,), (8,), (1,)))
    cli.app(
        ["elastic", str(folder), "--tasks", "text", "--samples", "2", "--no-latency", "--plot", str(plot)],
        standalone_mode=False,
    )
    shown = capsys.readouterr().out
    assert "experts" in shown and "*" in shown and str(plot) in shown.replace("\n", "")


def test_a_budget_takes_the_best_that_fits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ernie5.backbone.elastic.surface.default_grid", lambda config: Grid((2,), (8, 4), (1,))
    )
    out = tmp_path / "part"
    elastic.export(folder, out, budget_memory="1GB", budget_latency="100s", tasks="text", samples=1)
    measured = json.loads((out / elastic.PROVENANCE).read_text())["measured"]
    assert measured["resident_bytes"] <= 10**9 and measured["answer_ms"] <= 100_000
    assert load_model(out)[0].config.layers == 2
    with pytest.raises(
        InvalidInputError, match=r"no sub-network fits 0.001 ms: the smallest needs [\d.]+ ms"
    ):
        elastic.export(folder, tmp_path / "none", budget_latency="0.001ms", tasks="text", samples=1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "nothing to leave out"),
        ({"depth": 0.2}, "leaves 1 of 4 layers.*least depth is 0.5"),
        ({"experts": 0.01}, "leaves none of 8 experts"),
        ({"experts": 0.125, "top_k": 2}, "2 experts a token, but only 1 of 8 are active"),
        ({"top_k": 3}, r"outside \[1, 2\]"),
        ({"depth": 0.5, "budget_memory": "1MB"}, "give either those or budgets"),
        ({"budget_memory": "much"}, "'much' is no size"),
        ({"budget_latency": "fast"}, "'fast' is no duration"),
        ({"depth": 0.5, "data": "nowhere"}, "nowhere"),
        ({"depth": 0.5, "tasks": "digit_reed"}, "mini has no task digit_reed.*digit_read"),
    ],
)
def test_impossible_requests_fail_at_once(
    folder: Path, tmp_path: Path, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        elastic.export(folder, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_missing_models_full_folders_and_foreign_tokenizers_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="holds no model"):
        elastic.export(tmp_path / "nothing", tmp_path / "out", depth=0.5)
    with pytest.raises(InvalidInputError, match="is not empty"):
        elastic.export(folder, folder, depth=0.5)
    foreign = tmp_path / "foreign"
    save_model(foreign, Backbone(preset("nano")), tokenizer_hashes() | {"audio": "0" * 32})
    # Also where the samples would need no audio: what is exported must be able to answer.
    with pytest.raises(TokenizerMismatchError, match="trained with audio tokenizer 000000000000"):
        elastic.export(foreign, tmp_path / "out", depth=0.5, tasks="text")


def test_experts_may_stay_in_the_file(folder: Path) -> None:
    question = {"text": "Say something."}
    options = {"max_tokens": 8, "modalities": ("text",)}
    resident = ErnieMulti(folder).predict(question, **options)
    offline = ErnieMulti(folder, expert_memory="100kB")
    assert offline.predict(question, **options) == resident
    assert offline._local is not None and isinstance(offline._local.model, OffloadedBackbone)
    stats = offline._local.model.store.stats
    assert stats.misses > 0 and stats.peak_bytes <= 100_000


def test_sizes_and_durations() -> None:
    assert parse_bytes("200MB") == 200_000_000
    assert parse_bytes("1.5 GiB") == 3 * 2**29
    assert parse_bytes("4096") == 4096
    assert elastic.parse_milliseconds("50ms") == 50
    assert elastic.parse_milliseconds("0.2 s") == 200
