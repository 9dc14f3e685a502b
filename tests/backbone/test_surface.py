"""The Pareto front and the choice within budgets, on points given by hand; what an answer's timing covers."""

import numpy as np
import pytest

from ernie5.backbone.elastic.calibration import Loss
from ernie5.backbone.elastic.subnetwork import whole
from ernie5.backbone.elastic.surface import (
    Grid,
    Latency,
    Point,
    best_within,
    default_grid,
    mark_front,
    measure_latency,
    surface_steps,
)
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError
from tests.backbone.samples import NANO, picture, sequence, text
from tests.backbone.test_inference import HASHES, loud


def point(loss, megabytes, milliseconds):
    latency = Latency(milliseconds / 2, milliseconds / 2 / 19)
    memory = round(megabytes * 1e6)
    return Point(whole(NANO), 4, 8, 2, Loss(loss, {}), 0, 0, memory, memory, latency)


def test_the_front_is_what_nothing_beats():
    best, small, fast, beaten, twin = points = [
        point(1.0, 100, 100),
        point(2.0, 10, 90),
        point(3.0, 50, 10),
        point(3.0, 50, 95),
        point(1.0, 100, 100),
    ]
    mark_front(points)
    assert [p.front for p in points] == [True, True, True, False, True]
    assert best_within(points) is best
    assert best_within(points, memory=60_000_000) is small
    assert best_within(points, latency_ms=95) is small
    assert best_within(points, latency_ms=20) is fast
    assert best_within(points, memory=50_000_000, latency_ms=50) is fast
    assert beaten is not best_within(points) and twin.front


def test_budgets_that_nothing_fits_name_the_least():
    points = [point(2.0, 10, 90), point(3.0, 50, 10)]
    with pytest.raises(InvalidInputError, match="fits 9 MB: the smallest needs 10 MB"):
        best_within(points, memory=9_000_000)
    with pytest.raises(InvalidInputError, match="fits 5 ms: the smallest needs 10 ms"):
        best_within(points, latency_ms=5)
    with pytest.raises(InvalidInputError, match="both budgets at once"):
        best_within(points, memory=20_000_000, latency_ms=20)


def test_a_grid_leaves_out_what_is_impossible():
    grid = Grid((4, 2), (8, 1), (2, 1))
    assert (2, 2, 1) not in grid.combinations(NANO)
    assert len(grid.combinations(NANO)) == 2 * (2 + 1)
    default = default_grid(NANO)
    assert default.layers[0] == 4 and min(default.layers) >= len(NANO.kept_layers)
    assert default.experts == (8, 6, 4, 2) and default.top_k == (2, 1)
    # Two layers may go in 2 + 1 passes; 3 depths x 2 values of k want scores; all combinations are points.
    assert surface_steps(NANO, default) == 3 + 3 * 2 + 3 * 4 * 2


def test_what_is_timed_is_an_answer_of_the_wanted_length(monkeypatch):
    model = loud(NANO)
    rng = np.random.default_rng(0)
    prompt = sequence(picture(rng, "context"), text(rng, "context"))
    ticks = iter(range(10_000))
    monkeypatch.setattr("ernie5.backbone.elastic.surface.time.process_time", lambda: next(ticks))
    steps = []
    text_logits = Backbone.text_logits
    monkeypatch.setattr(
        Backbone, "text_logits", lambda self, hidden: steps.append(1) or text_logits(self, hidden)
    )
    latency = measure_latency(model, HASHES, prompt, tokens=7, repeats=2)
    # Three answers of seven tokens each, whatever the model would rather say.
    assert len(steps) == 3 * 7
    assert latency.answer_ms == latency.prefill_ms + 19 * latency.decode_ms
    assert latency.prefill_ms == 1000
