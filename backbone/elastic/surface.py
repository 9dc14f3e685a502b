"""The trade-off surface: quality, size, memory and latency of sub-networks on a grid; its Pareto front."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.elastic.calibration import Loss, measure_loss
from ernie5.backbone.elastic.extraction import extract
from ernie5.backbone.elastic.importance import DEFAULT_SCORE, rank_layers, ranking_passes, score_experts
from ernie5.backbone.elastic.resident import ResidentMeter, ResidentRequest
from ernie5.backbone.elastic.subnetwork import SubNetwork, best_experts, pool_counts, whole
from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import RowBatch
from ernie5.backbone.training.checkpoint import save_model
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.generation import GenerationParams, Request
from ernie5.protocol.tokens import TokenSequence

ANSWER_TOKENS = 20
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Latency:
    """Milliseconds on one core: ``prefill_ms`` to the first token, ``decode_ms`` of each further one."""

    prefill_ms: float
    decode_ms: float

    @property
    def answer_ms(self) -> float:
        """A prompt and :data:`ANSWER_TOKENS` tokens."""
        return self.prefill_ms + (ANSWER_TOKENS - 1) * self.decode_ms


@dataclass
class Point:
    """One sub-network and what it costs; memory and latency are None where they weren't asked for.

    ``weight_bytes`` is the size of its weights, ``resident_bytes`` what a process that loads them grows by.
    """

    subnetwork: SubNetwork
    layers: int
    experts: int
    top_k: int
    loss: Loss
    parameters: int
    active_parameters: int
    weight_bytes: int
    resident_bytes: int | None = None
    latency: Latency | None = None
    front: bool = False

    def as_json(self) -> dict[str, Any]:
        latency = self.latency
        return {
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "loss": self.loss.total,
            "nats": self.loss.nats,
            "exact": self.loss.exact,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "weight_bytes": self.weight_bytes,
            "resident_bytes": self.resident_bytes,
            "prefill_ms": None if latency is None else latency.prefill_ms,
            "decode_ms": None if latency is None else latency.decode_ms,
            "answer_ms": None if latency is None else latency.answer_ms,
            "pareto": self.front,
            "kept_layers": list(self.subnetwork.layers),
            "kept_experts": [
                None if ids is None else list(ids)
                for layer, ids in enumerate(self.subnetwork.experts)
                if layer in self.subnetwork.layers
            ],
        }


@dataclass(frozen=True)
class Grid:
    """Numbers of layers, of experts and of experts a token; those with k above the experts are left out."""

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    top_k: tuple[int, ...]

    def combinations(self, config: BackboneConfig) -> list[tuple[int, int, int]]:
        """(layers, k, experts), experts fastest."""
        return [
            (layers, k, experts)
            for layers, k, experts in product(self.layers, self.top_k, self.experts)
            if k <= min(pool_counts(config, experts))
        ]


def default_grid(config: BackboneConfig) -> Grid:
    """All layers and about 80, 60 and 40 % of them; all experts, 75, 50 and 30 %; k, its halves down to 1."""
    layers = {max(round(share * config.layers), len(config.kept_layers)) for share in (1, 0.8, 0.6, 0.4)}
    experts = {max(round(share * config.experts), 1) for share in (1, 0.75, 0.5, 0.3)}
    ks = {max(config.top_k >> shift, 1) for shift in range(4)}
    descending = [tuple(sorted(values, reverse=True)) for values in (layers, experts, ks)]
    return Grid(*descending)


def surface_steps(config: BackboneConfig, grid: Grid) -> int:
    """How often :func:`measure_surface` reports progress."""
    points = grid.combinations(config)
    scored = {(layers, k) for layers, k, experts in points if experts < config.experts}
    return ranking_passes(config, config.layers - min(grid.layers)) + len(scored) + len(points)


def measure_surface(
    model: Backbone,
    tokenizers: Mapping[str, str],
    calibration: Sequence[RowBatch],
    held_out: Sequence[RowBatch],
    *,
    grid: Grid | None = None,
    prompt: TokenSequence | None = None,
    memory: bool = True,
    on_step: Progress = lambda _: None,
) -> list[Point]:
    """Measure every sub-network of the grid, chosen by importance on ``calibration``; marks the Pareto front.

    Layers are ranked once, in the whole network; experts are scored for each number of layers and k.

    Args:
        held_out: rows on which the losses are measured.
        prompt: a question whose answer is timed; latency is not measured without it.
        memory: measure resident bytes, in a child process.
        on_step: told what was done, :func:`surface_steps` times.
    """
    config = model.config
    grid = grid or default_grid(config)
    points: list[Point] = []
    ranking = rank_layers(
        model,
        calibration,
        drops=config.layers - min(grid.layers),
        on_pass=lambda: on_step("ranking layers"),
    )
    scores: dict[tuple[int, int], Tensor] = {}
    resident: dict[tuple[int, int], int] = {}
    with ResidentMeter() if memory else nullcontext() as meter:
        for count, k, active in grid.combinations(config):
            layers = ranking.keep(config, count)
            if active < config.experts and (count, k) not in scores:
                scores[count, k] = score_experts(model, calibration, DEFAULT_SCORE, layers=layers, top_k=k)
                on_step("scoring experts")
            experts = whole(config).experts
            if active < config.experts:
                experts = best_experts(config, scores[count, k], active)
            point, part = _point(model, SubNetwork(layers, experts, k), held_out)
            if meter is not None:
                if (count, active) not in resident:
                    resident[count, active] = _resident(meter, part, tokenizers)
                point.resident_bytes = resident[count, active]
            if prompt is not None:
                point.latency = measure_latency(part, tokenizers, prompt)
            points.append(point)
            on_step(f"{count} layers, {active} experts, k {k}")
    mark_front(points)
    return points


def _point(model: Backbone, subnetwork: SubNetwork, held_out: Sequence[RowBatch]) -> tuple[Point, Backbone]:
    """Quality and size of a sub-network, and the model extracted for it."""
    part = extract(model, subnetwork)
    config, feed_forward = part.config, part.feed_forward(0)
    expert = feed_forward.gate_up[0].numel() + feed_forward.down[0].numel()
    parameters = sum(value.numel() for value in part.parameters())
    idle = config.layers * (config.experts - config.top_k) * expert
    point = Point(
        subnetwork,
        config.layers,
        config.experts,
        config.top_k,
        measure_loss(part, held_out),
        parameters,
        parameters - idle,
        sum(value.nbytes for value in part.state_dict().values()),
    )
    return point, part


def _resident(meter: ResidentMeter, part: Backbone, tokenizers: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), part, tokenizers)
        return meter.measure(ResidentRequest(folder))["loaded"]


def costs(point: Point) -> tuple[float, ...]:
    """What the Pareto front weighs: loss, memory, latency; smaller is better."""
    memory = point.weight_bytes if point.resident_bytes is None else point.resident_bytes
    latency = point.active_parameters if point.latency is None else point.latency.answer_ms
    return point.loss.total, memory, latency


def mark_front(points: Sequence[Point]) -> None:
    """Set ``front`` where no other point is at least as good in all costs and better in one."""
    values = [costs(point) for point in points]
    for point, mine in zip(points, values):
        point.front = not any(
            other != mine and all(theirs <= own for theirs, own in zip(other, mine)) for other in values
        )


def best_within(
    points: Sequence[Point], *, memory: int | None = None, latency_ms: float | None = None
) -> Point:
    """The point of least loss within the budgets, in bytes of resident weights and milliseconds an answer.

    Raises:
        InvalidInputError: none fits; the message names the least that any needs.
    """
    for name, budget, index, unit in (
        ("memory", memory, 1, 1e-6),
        ("latency", latency_ms, 2, 1.0),
    ):
        least = min(costs(point)[index] for point in points) * unit
        if budget is not None and least > budget * unit:
            word = "MB" if name == "memory" else "ms"
            raise InvalidInputError(
                f"no sub-network fits {budget * unit:g} {word}: the smallest needs {least:.3g} {word}; "
                "raise the budget, or start from a smaller model",
                param=f"budget_{name}",
            )
    fitting = [
        point
        for point in points
        if (memory is None or costs(point)[1] <= memory)
        and (latency_ms is None or costs(point)[2] <= latency_ms)
    ]
    if not fitting:
        raise InvalidInputError(
            "no sub-network fits both budgets at once; raise one of them", param="budget_memory"
        )
    return min(fitting, key=costs)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_latency(
    model: Backbone,
    tokenizers: Mapping[str, str],
    prompt: TokenSequence,
    *,
    tokens: int = ANSWER_TOKENS,
    repeats: int = 3,
) -> Latency:
    """Time the engine's answer to a prompt on one core; the best of ``repeats``, after one to warm up.

    The answer is greedy text, kept from ending before ``tokens``. What is measured is the processor time of
    one thread: the latency on a core that nobody else uses, whatever else this machine is doing.
    """
    params = GenerationParams(temperature=0.0, seed=0, max_tokens=tokens, modalities=("text",))
    engine = InferenceEngine(model, tokenizers, capacity=1)
    end = engine.vocabulary.marker("end_turn")
    text_logits = model.text_logits

    def without_end(hidden: Tensor) -> Tensor:
        logits = text_logits(hidden)
        logits[..., end] = -torch.inf
        return logits

    prefills, decodes = [], []
    model.__dict__["text_logits"] = without_end
    try:
        with _one_thread():
            for _ in range(repeats + 1):
                engine.submit(Request("timed", prompt, params))
                started = time.process_time()
                engine.step()
                first = time.process_time()
                steps = 0
                while engine.active:
                    engine.step()
                    steps += 1
                prefills.append(first - started)
                decodes.append((time.process_time() - first) / max(1, steps))
    finally:
        del model.__dict__["text_logits"]
    return Latency(1e3 * min(prefills[1:]), 1e3 * min(decodes[1:]))
