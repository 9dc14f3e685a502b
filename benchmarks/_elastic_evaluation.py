"""Evaluation of an arm of the elastic benchmark: sub-models without retraining, and what k = 1 saves.

An answer is right if its whole text is the likeliest at every step, end marker included: what greedy decoding
would say. The loss of text is the mean over the tokens of held-out rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from _elastic_data import CAPTIONS, DIGITS, TEXT, Data
from _measure import take_turns
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.elastic.calibration import calibration_batches, routing_of
from ernie5.backbone.elastic.importance import (
    LayerRanking,
    random_experts,
    random_layers,
    rank_layers,
    score_experts,
)
from ernie5.backbone.elastic.subnetwork import SubNetwork, best_experts, whole
from ernie5.backbone.model.experts import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import RowBatch
from ernie5.protocol.tokens import TokenSegment, TokenSequence

RANDOM_CHOICES = 3
# name: layers kept (None: all), experts kept, k
SUBMODELS: dict[str, tuple[int | None, int | None, int | None]] = {
    "keep5of8": (5, None, None),
    "keep3of8": (3, None, None),
    "half_width": (None, 8, None),
    "k1": (None, None, 1),
    "combined": (5, 8, 1),
}


@dataclass(frozen=True)
class Score:
    """Share of right answers by task, and nats per token of text."""

    digits: float
    captions: float
    text: float

    @property
    def accuracy(self) -> float:
        """Mean over the two tasks that have right answers."""
        return (self.digits + self.captions) / 2


class Test:
    """Held-out rows of each task, laid out once."""

    def __init__(self, data: Data, model: Backbone, *, row_length: int = 512, part: int = 1) -> None:
        """``part`` takes every so manieth sample only."""
        self.batches = {
            task: calibration_batches(samples[::part], model.config, row_length=row_length, rows=8)
            for task, samples in data.test.items()
        }

    @torch.inference_mode()
    def score(self, model: Backbone, chosen: SubNetwork | None = None) -> Score:
        """Score the model, or a sub-model of it."""
        right: dict[str, list[bool]] = {DIGITS: [], CAPTIONS: []}
        nats, tokens = 0.0, 0
        for task, batches in self.batches.items():
            for batch in batches:
                layers = None if chosen is None else chosen.layers
                logits = model(batch, layers=layers, routing=routing_of(model, batch, chosen)).text
                if task == TEXT:
                    nats += float(F.cross_entropy(logits, batch.text_target, reduction="sum"))
                    tokens += len(batch.text_target)
                else:
                    right[task] += _right_answers(logits, batch)
        return Score(float(np.mean(right[DIGITS])), float(np.mean(right[CAPTIONS])), nats / tokens)


def _right_answers(logits: Tensor, batch: RowBatch) -> list[bool]:
    owner = batch.sample.flatten()[batch.text_at]
    wrong = torch.zeros(batch.samples, dtype=torch.long)
    wrong.index_add_(0, owner, (logits.argmax(-1) != batch.text_target).long())
    return (wrong[owner.unique()] == 0).tolist()


def evaluate(
    model: Backbone,
    data: Data,
    *,
    part: int = 1,
    submodels: bool = True,
    on_score: Callable[[str, Score], None] | None = None,
) -> dict[str, Any]:
    """Scores of the full model and of every sub-model, calibrated and at random; JSON-ready.

    Layers are dropped greedily by the loss on calibration samples, experts kept by what they put out there,
    each task counting the same: by tokens, text would leave little to answers of a word. The random choices'
    scores are means over three.
    """
    test = Test(data, model, part=part)
    config = model.config

    def rows(samples: Sequence[TokenSequence]) -> list[RowBatch]:
        return calibration_batches(samples, config, row_length=512, rows=8)

    result: dict[str, Any] = {}

    def keep(name: str, scores: Sequence[Score], **more: Any) -> None:
        mean = Score(*(float(np.mean([asdict(s)[key] for s in scores])) for key in (DIGITS, CAPTIONS, TEXT)))
        result[name] = asdict(mean) | more
        if on_score is not None:
            on_score(name, mean)

    keep("full", [test.score(model)])
    if not submodels:
        return result
    fewest = min(layers for layers, _, _ in SUBMODELS.values() if layers is not None)
    ranking = rank_layers(model, rows(data.mixed(data.calibration)[::part]), drops=config.layers - fewest)
    by_task = [rows(samples[::part]) for samples in data.calibration.values()]
    for name, (layers, experts, top_k) in SUBMODELS.items():
        k = top_k or config.top_k
        chosen = _calibrated(model, by_task, ranking, layers, experts, k)
        keep(name, [test.score(model, chosen)], layers=list(chosen.layers))
        if layers is not None or experts is not None:
            choices = [_random(model, layers, experts, k, seed) for seed in range(RANDOM_CHOICES)]
            keep(f"{name}_random", [test.score(model, choice) for choice in choices])
    return result


def _calibrated(
    model: Backbone,
    by_task: Sequence[Sequence[RowBatch]],
    ranking: LayerRanking,
    layers: int | None,
    experts: int | None,
    top_k: int,
) -> SubNetwork:
    full = whole(model.config)
    kept = full.layers if layers is None else ranking.keep(model.config, layers)
    if experts is None:
        return SubNetwork(kept, full.experts, top_k)
    # Each task's scores add up to the same in every layer.
    scores = torch.stack([score_experts(model, rows, layers=kept, top_k=top_k) for rows in by_task]).sum(0)
    return SubNetwork(kept, best_experts(model.config, scores, experts), top_k)


def _random(model: Backbone, layers: int | None, experts: int | None, top_k: int, seed: int) -> SubNetwork:
    config, full = model.config, whole(model.config)
    kept = full.layers if layers is None else random_layers(config, seed).keep(config, layers)
    if experts is None:
        return SubNetwork(kept, full.experts, top_k)
    return SubNetwork(kept, best_experts(config, random_experts(config, seed), experts), top_k)


def k1_latency(model: Backbone, data: Data, *, length: int = 1024, rounds: int = 15) -> dict[str, float]:
    """Share of the time that k = 1 saves on one row forward, of the expert layers and of the whole model.

    The row holds prompts, each with the next token or two to predict, as when answering; with logits at
    every position of text, as in training, the text head weighs more (``_all_logits``). Expert layers,
    routers included, get the hidden states that they see in the whole model. Arms take turns on one thread;
    times are CPU seconds.
    """
    config = model.config
    samples = data.mixed(data.test)
    asked, trained = (
        calibration_batches(some, config, row_length=length, rows=1)[0]
        for some in ([_prompt(sample) for sample in samples], samples)
    )
    arms: dict[str, Callable[[], object]] = {}
    for k in (config.top_k, 1):
        routing = SubNetwork(whole(config).layers, whole(config).experts, k).routing()
        with _inputs(model) as inputs, torch.inference_mode():
            model(asked, routing=routing)
        arms[f"experts k{k}"] = _expert_forward(model, inputs, routing)
        arms[f"model k{k}"] = _whole_forward(model, asked, routing)
        arms[f"all_logits k{k}"] = _whole_forward(model, trained, routing)
    times = take_turns(arms, rounds=rounds, threads=1)

    def gain(arm: str) -> float:
        return 1 - 1 / (times.ratio(f"{arm} k{config.top_k}", f"{arm} k1") or 1)

    return {
        "k1_expert_latency_gain": gain("experts"),
        "k1_latency_gain": gain("model"),
        "k1_latency_gain_all_logits": gain("all_logits"),
        "row_length": float(length),
        **{f"{name.replace(' ', '_')}_ms": 1000 * (times.median(name) or float("nan")) for name in arms},
    }


def _prompt(sample: TokenSequence) -> TokenSequence:
    """The sample with all but the last token of a long target given."""
    segments = []
    for segment in sample.segments:
        span = segment.span
        if segment.role == "target" and len(span) > 8:
            given, asked = (replace(span, codes=codes) for codes in (span.codes[:-1], span.codes[-1:]))
            segments += [TokenSegment(given, "context"), TokenSegment(asked, "target")]
        else:
            segments.append(segment)
    return replace(sample, segments=tuple(segments))


def _whole_forward(model: Backbone, batch: RowBatch, routing: Routing) -> Callable[[], object]:
    @torch.inference_mode()
    def forward() -> object:
        return model(batch, routing=routing).text

    return forward


def _expert_forward(model: Backbone, inputs: dict[int, Tensor], routing: Routing) -> Callable[[], object]:
    @torch.inference_mode()
    def forward() -> object:
        return [model.feed_forward(layer)(x, routing, layer) for layer, x in inputs.items()]

    return forward


@contextmanager
def _inputs(model: Backbone) -> Iterator[dict[int, Tensor]]:
    """What each expert layer is given meanwhile."""
    seen: dict[int, Tensor] = {}

    def note(layer: int) -> Callable[..., None]:
        def hook(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            seen[layer] = arguments[0]

        return hook

    handles = [
        model.feed_forward(layer).register_forward_pre_hook(note(layer))
        for layer in range(model.config.layers)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
