"""The guess of a token's difficulty: what it is fitted to and leaves alone, and that hard tokens get more."""

import numpy as np
import torch

from ernie5.backbone.config import BackboneConfig, ElasticConfig
from ernie5.backbone.evaluation.allocation import rank_correlation, token_costs
from ernie5.backbone.evaluation.routing import calibration_rows
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.router import Routing
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.objectives.complexity import difficulty, estimate_losses, position_losses
from ernie5.backbone.objectives.next_group import loss_sums
from ernie5.backbone.rows import pack
from ernie5.backbone.training.trainer import Trainer, TrainingConfig
from ernie5.protocol.tokens import SequenceLayout, TokenSegment, TokenSequence, TokenSpan
from tests.backbone.samples import NANO, VOCABULARY, mixed

ROUTER = {"allocation": {"policy": "threshold", "budget": 3.0}}
CONFIG = BackboneConfig.model_validate(
    NANO.model_dump() | {"top_k": 6, "router": ROUTER, "elastic": ElasticConfig.off().model_dump()}
)


def passed(config: BackboneConfig):
    rng = np.random.default_rng(0)
    batch = pack([[lay_out(mixed(rng, kind), config, VOCABULARY) for kind in range(5)]], 160, config)
    model = Backbone(config)
    routing = Routing(counted=torch.ones(160, dtype=torch.bool))
    return model, batch, model(batch, routing=routing), routing


def test_position_losses_are_those_of_training():
    _, batch, outputs, _ = passed(CONFIG)
    losses, sums = position_losses(outputs, batch), loss_sums(outputs, batch)
    text, vision, audio = (losses[name][1] for name in ("text", "vision", "audio"))
    torch.testing.assert_close((text * batch.text_weight).sum(), sums.total["text"])
    torch.testing.assert_close((vision * batch.bits_weight).sum(), sums.total["vision"])
    torch.testing.assert_close(audio.sum() * CONFIG.audio_levels, sums.total["audio"])


def test_the_fit_reaches_the_guess_and_nothing_else():
    model, batch, outputs, routing = passed(CONFIG)
    terms = estimate_losses(outputs, batch, routing)
    assert len(terms) == CONFIG.layers
    sum(terms).backward()
    touched = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert touched == {f"layers.{layer}.feed_forward.complexity" for layer in range(CONFIG.layers)}
    # By hand, for one layer.
    at, wanted = difficulty(position_losses(outputs, batch))
    error = routing.estimates[1].detach()[at] - wanted
    torch.testing.assert_close(terms[1].detach(), 0.01 * error.square().mean())


def test_difficulty_ranks_a_loss_within_its_modality():
    losses = {
        "text": (torch.tensor([4, 1, 7, 2]), torch.tensor([0.1, 9.0, 0.3, 0.2])),
        "audio": (torch.tensor([5, 6]), torch.tensor([5.0, 4.0])),
    }
    at, ranks = difficulty(losses)
    assert at.tolist() == [4, 1, 7, 2, 5, 6]
    assert ranks.tolist() == [0.125, 0.875, 0.625, 0.375, 0.75, 0.25]


def test_a_fixed_allocation_guesses_nothing():
    model, batch, outputs, routing = passed(NANO)
    assert not routing.estimates and estimate_losses(outputs, batch, routing) == []
    assert not any("complexity" in name for name in model.state_dict())


def test_tokens_that_cant_be_known_get_more_experts_within_the_budget(tmp_path):
    """Half of each text repeats one code, half is noise that follows codes of its own."""

    def sample(number: int) -> TokenSequence:
        rng = np.random.default_rng(number)
        codes = np.concatenate((np.full(12, 3), rng.integers(10, NANO.text_vocabulary, 12))).astype(np.int32)
        span = TokenSpan("text", SequenceLayout(NANO.text_vocabulary), codes, "t")
        return TokenSequence(str(number), (TokenSegment(span, "target"),))

    training = TrainingConfig(steps=60, rows=2, row_length=128, warmup=5, threads=1, learning_rate=1e-2)
    trainer = Trainer(CONFIG, training, tmp_path, {})
    reports = list(trainer.run((position, sample(position)) for position in range(10**6)))
    assert abs(np.mean([report.experts_per_token for report in reports[-20:]]) - 3.0) < 0.05 * 3.0
    held_out = [lay_out(sample(number), CONFIG, VOCABULARY) for number in range(10**7, 10**7 + 20)]
    costs = token_costs(trainer.model.eval(), calibration_rows(held_out, CONFIG, length=128))["text"]
    found = rank_correlation(costs, draws=200)
    assert found.low > 0.3
    hard = costs.loss > 2
    assert costs.experts[hard].mean() > costs.experts[~hard].mean() + 1
