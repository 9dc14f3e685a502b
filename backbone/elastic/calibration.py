"""Calibration: the loss of sub-networks on given samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.elastic.subnetwork import SubNetwork
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.experts import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.next_group import LossSums, LossWeights, loss_sums, weighted_loss
from ernie5.backbone.rows import RowBatch, pack
from ernie5.backbone.training.packing import pack_steps
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.tokens import TokenSequence
from ernie5.protocol.vocabulary import UnifiedVocabulary


@dataclass(frozen=True)
class Loss:
    """What a network loses on some samples.

    Attributes:
        total: what training minimises: the sum of the modalities, each over a blind guess's loss.
        nats: the mean of each modality that occurs, per prediction.
        exact: of the samples that say text alone, the share whose whole text is the likeliest at every step,
            which is what greedy decoding says.
    """

    total: float
    nats: dict[str, float]
    exact: float | None = None


def calibration_batches(
    samples: Iterable[TokenSequence], config: BackboneConfig, *, row_length: int = 1024, rows: int = 2
) -> list[RowBatch]:
    """Pack samples in order into batches of ``rows`` rows; those longer than a row are left out.

    Raises:
        InvalidInputError: the model can't take a sample, or none remains.
    """
    vocabulary = UnifiedVocabulary(config.text_vocabulary)
    laid_out = (lay_out(sample, config, vocabulary) for sample in samples)
    fitting = enumerate(item for item in laid_out if len(item) <= row_length)
    batches = [pack(step.rows, row_length, config) for step in pack_steps(fitting, rows, row_length)]
    if not batches:
        raise InvalidInputError(f"no sample to calibrate on fits a row of {row_length} positions")
    return batches


def routing_of(model: Backbone, batch: RowBatch, subnetwork: SubNetwork | None) -> Routing:
    """Routing of a forward pass of a sub-network, or of the whole model, over these rows."""
    routing = Routing() if subnetwork is None else subnetwork.routing()
    if model.config.router.pool == "isolated":
        routing.group = batch.group.flatten()
    return routing


@torch.inference_mode()
def measure_loss(model: Backbone, batches: Sequence[RowBatch], subnetwork: SubNetwork | None = None) -> Loss:
    """Teacher-forced loss of the model, or of a sub-network of it, over all batches."""
    total: dict[str, torch.Tensor] = {}
    count: dict[str, float] = {}
    right: list[bool] = []
    for batch in batches:
        batch = batch.to(model.device)
        layers = None if subnetwork is None else subnetwork.layers
        routing = routing_of(model, batch, subnetwork).to(model.device)
        outputs = model(batch, layers=layers, routing=routing)
        sums = loss_sums(outputs, batch)
        for name, value in sums.total.items():
            total[name] = total[name] + value if name in total else value
            count[name] = count.get(name, 0.0) + sums.count[name]
        right += _exact_answers(outputs.text, batch)
    loss = weighted_loss(LossSums(total, count), count, model.config, LossWeights())
    nats = {name: float(total[name]) / count[name] for name in total if count[name]}
    return Loss(float(loss), nats, sum(right) / len(right) if right else None)


def _exact_answers(logits: torch.Tensor, batch: RowBatch) -> list[bool]:
    """Whether all of its text is right, for each sample that has text to say and nothing else."""
    owner = batch.sample.flatten()
    hit = logits.argmax(-1) == batch.text_target
    wrong = torch.zeros(batch.samples, dtype=torch.long, device=owner.device)
    wrong.index_add_(0, owner[batch.text_at], (~hit).long())
    speaks = torch.zeros(batch.samples, dtype=torch.bool, device=owner.device)
    speaks[owner[batch.text_at]] = True
    for at in (batch.bits_at, batch.audio_at):
        speaks[owner[at]] = False
    return (wrong[speaks] == 0).tolist()
