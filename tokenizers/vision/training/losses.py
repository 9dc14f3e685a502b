"""Losses beside the reconstruction that the picture tokenizer may be trained with; each is off by default.

    extra = ExtraLosses(ExtraLossOptions(perceptual_weight=0.1), trunk_width=96, teacher=teacher)
    terms = extra.terms(batch, decoded, trunk, progress, reconstruction=loss)
    (loss + sum(terms.values())).backward()
    extra.update(batch, decoded, progress)

* perceptual: distance between the feature maps of a frozen network (Johnson 2016; channels normalised as
  LPIPS does, without its learnt weights). The network is the teacher, or fixed random convolutions without
  one.
* adversarial: a patch discriminator's hinge loss (Isola 2017, Lim and Ye 2017), held back by LeCam's
  regulariser (Tseng 2021), from a share of the run on. Its gradient on the decoded pictures is scaled to a
  share of the reconstruction's, so one weight fits any stage of training (VQGAN's adaptive weight, Esser
  2021, taken at the decoder's output as EnCodec's balancer does, Défossez 2022).
* semantic: cosine between a projection of the encoder's trunk and the teacher's cells (ERNIE 5.0 report,
  section 2.2.1), so that features before quantisation say what is seen.

Shape legend: B pictures, H = 8 h and W = 8 w pixels, h x w cells, C = trunk width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.protocol.errors import InvalidInputError
from ernie5.tokenizers.vision.training.checkpoint import (
    named,
    optimizer_state,
    part_of,
    restore_optimizer,
)
from ernie5.tokenizers.vision.training.teacher import CELL_WIDTH, FeatureNetwork, RandomNetwork, Teacher

_LECAM_DECAY = 0.99
_STATISTICS_DECAY = 0.99


@dataclass(frozen=True, slots=True)
class ExtraLossOptions:
    """Weights, 0 for off, and settings.

    Attributes:
        perceptual_stages: of the network's, fine to coarse; at most 4 without a teacher.
        adversarial_weight: norm of the adversarial gradient over that of the reconstruction's.
        adversarial_start: share of the run from which the decoder feels the discriminator.
        discriminator_lead: share of the run for which the discriminator learns alone before that.
        lecam_weight: of the regulariser in the discriminator's loss.
    """

    perceptual_weight: float = 0.0
    perceptual_stages: int = 4
    adversarial_weight: float = 0.0
    adversarial_start: float = 0.5
    discriminator_lead: float = 0.05
    discriminator_width: int = 32
    discriminator_learning_rate: float = 5e-4
    lecam_weight: float = 0.01
    semantic_weight: float = 0.0
    semantic_learning_rate: float = 1.5e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("perceptual_weight", "adversarial_weight", "semantic_weight", "lecam_weight"):
            if getattr(self, name) < 0:
                raise InvalidInputError(f"{name} {getattr(self, name)} is negative; 0 is off", param=name)
        if not 0 <= self.adversarial_start <= 1:
            raise InvalidInputError(
                f"adversarial_start {self.adversarial_start} is a share of the run, from 0 to 1",
                param="adversarial_start",
            )


class PerceptualLoss:
    """Mean squared distance of unit vectors of features, averaged over places and stages."""

    def __init__(self, network: FeatureNetwork, stages: int) -> None:
        self.network, self.count = network, stages

    def __call__(self, batch: Tensor, decoded: Tensor) -> Tensor:
        """Pictures ``[B, 3, H, W]`` and their decodings to ``[B]``; gradients reach ``decoded``."""
        with torch.no_grad():
            wanted = self.network.stages(batch, self.count)
        maps = self.network.stages(decoded, self.count)
        distances = [
            (_unit(left) - _unit(right)).square().sum(1).mean((1, 2)) for left, right in zip(maps, wanted)
        ]
        return torch.stack(distances).mean(0)


class Discriminator(nn.Module):
    """Tells drawn from decoded, for patches of about 30 pixels every 8."""

    real_score: Tensor
    decoded_score: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, padding=1), nn.LeakyReLU(0.2)]
        for inputs in (width, 2 * width):
            layers += [nn.Conv2d(inputs, 2 * inputs, 4, 2, padding=1), nn.GroupNorm(8, 2 * inputs)]
            layers += [nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(4 * width, 1, 3, padding=1))
        # Running means of the scores, LeCam's anchors.
        self.register_buffer("real_score", torch.zeros(()))
        self.register_buffer("decoded_score", torch.zeros(()))

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures ``[B, 3, H, W]`` in [0, 1] to scores ``[B, 1, h, w]``; high where they look drawn."""
        scores: Tensor = self.layers(pictures * 2 - 1)
        return scores

    def loss(self, batch: Tensor, decoded: Tensor, lecam_weight: float) -> Tensor:
        """Hinge loss and regulariser, a scalar; moves the anchors."""
        real, made = self(batch), self(decoded.detach())
        with torch.no_grad():
            self.real_score.lerp_(real.mean(), 1 - _LECAM_DECAY)
            self.decoded_score.lerp_(made.mean(), 1 - _LECAM_DECAY)
        hinge = F.relu(1 - real).mean() + F.relu(1 + made).mean()
        apart = F.relu(real - self.decoded_score).square() + F.relu(self.real_score - made).square()
        return hinge + lecam_weight * apart.mean()


class SemanticProjection(nn.Module):
    """From the trunk to the teacher's cells, with the running statistics that standardise those."""

    mean: Tensor
    square: Tensor
    batches: Tensor

    def __init__(self, trunk_width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(trunk_width, trunk_width, 1), nn.SiLU(), nn.Conv2d(trunk_width, CELL_WIDTH, 1)
        )
        self.register_buffer("mean", torch.zeros(CELL_WIDTH))
        self.register_buffer("square", torch.zeros(CELL_WIDTH))
        self.register_buffer("batches", torch.zeros(()))

    def distance(self, trunk: Tensor, cells: Tensor) -> Tensor:
        """Trunk ``[B, C, h, w]`` and the teacher's cells ``[B, 112, h, w]`` to 1 - cosine, ``[B]``."""
        with torch.no_grad():
            # The first batches count alike, later ones fade.
            self.batches.add_(1)
            share = max(1 - _STATISTICS_DECAY, 1 / float(self.batches))
            self.mean.lerp_(cells.mean((0, 2, 3)), share)
            self.square.lerp_(cells.square().mean((0, 2, 3)), share)
            deviation = (self.square - self.mean.square()).clamp_min(1e-4).sqrt()
            wanted = (cells - self.mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1)
        return 1 - F.cosine_similarity(self.layers(trunk), wanted.clamp(-5, 5), dim=1).mean((1, 2))


class ExtraLosses:
    """The losses that are on, with the networks and optimisers that only they need."""

    def __init__(self, options: ExtraLossOptions, trunk_width: int, teacher: Teacher | None = None) -> None:
        if options.semantic_weight and teacher is None:
            raise InvalidInputError(
                "the semantic loss needs a teacher; name its weights, or set semantic_weight to 0",
                param="semantic_weight",
            )
        self.options, self.teacher = options, teacher
        self.perceptual: PerceptualLoss | None = None
        self.discriminator: Discriminator | None = None
        self.semantic: SemanticProjection | None = None
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        # Drawing these networks' weights must not change what the trainer draws next.
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(options.seed)
            if options.perceptual_weight:
                self.perceptual = PerceptualLoss(teacher or RandomNetwork(), options.perceptual_stages)
            if options.adversarial_weight:
                self.discriminator = Discriminator(options.discriminator_width)
                self.optimizers["discriminator"] = torch.optim.AdamW(
                    self.discriminator.parameters(), options.discriminator_learning_rate, betas=(0.5, 0.9)
                )
            if options.semantic_weight:
                self.semantic = SemanticProjection(trunk_width)
                self.optimizers["semantic"] = torch.optim.AdamW(
                    self.semantic.parameters(), options.semantic_learning_rate, betas=(0.9, 0.95)
                )

    def card(self) -> dict[str, object]:
        """What was on, by which network, for a card; empty where nothing was."""
        entries: dict[str, object] = {}
        if self.perceptual is not None:
            entries["perceptual"] = {
                "weight": self.options.perceptual_weight,
                "network": self.perceptual.network.source,
            }
        if self.discriminator is not None:
            entries["adversarial"] = {
                "weight": self.options.adversarial_weight,
                "start": self.options.adversarial_start,
            }
        if self.semantic is not None and self.teacher is not None:
            entries["semantic"] = {"weight": self.options.semantic_weight, "network": self.teacher.source}
        return entries

    def terms(
        self,
        batch: Tensor,
        decoded: Tensor,
        trunk: Tensor,
        progress: float,
        *,
        reconstruction: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Weighted terms to add to the loss, by name; only those that are on at ``progress``.

        Args:
            batch: pictures ``[B, 3, H, W]`` in [0, 1].
            decoded: their decodings, with gradients, not clamped.
            trunk: ``[B, C, h, w]`` of the encoder, with gradients.
            progress: share of the run, in [0, 1].
            reconstruction: the loss so far, a scalar, which the adversarial gradient is measured by; a mean
                absolute error if None.
            weight: float ``[B]`` of each picture, adding up to 1; alike if None.
        """
        options = self.options
        if weight is None:
            weight = batch.new_full((len(batch),), 1 / len(batch))
        terms: dict[str, Tensor] = {}
        if self.perceptual is not None:
            distance = (weight * self.perceptual(batch, decoded)).sum()
            terms["perceptual"] = options.perceptual_weight * distance
        if self.semantic is not None and self.teacher is not None:
            with torch.no_grad():
                doubled = F.interpolate(batch, scale_factor=2, mode="bilinear", align_corners=False)
                cells = self.teacher.cells(doubled)
            distance = (weight * self.semantic.distance(trunk, cells)).sum()
            terms["semantic"] = options.semantic_weight * distance
        if self.discriminator is not None and progress >= options.adversarial_start:
            if reconstruction is None:
                reconstruction = (decoded - batch).abs().mean()
            # Its own gradients aren't wanted here.
            self.discriminator.requires_grad_(False)
            score = -(weight * self.discriminator(decoded).mean((1, 2, 3))).sum()
            self.discriminator.requires_grad_(True)
            scale = _gradient_norm(reconstruction, decoded) / (_gradient_norm(score, decoded) + 1e-8)
            terms["adversarial"] = options.adversarial_weight * scale.clamp(max=1e4) * score
        return terms

    def update(self, batch: Tensor, decoded: Tensor, progress: float) -> dict[str, float]:
        """Step the projection by the gradients of the backward pass, and teach the discriminator.

        Returns:
            The discriminator's loss where it learnt, by name.
        """
        measures: dict[str, float] = {}
        if "semantic" in self.optimizers:
            self.optimizers["semantic"].step()
            self.optimizers["semantic"].zero_grad(set_to_none=True)
        options = self.options
        if (
            self.discriminator is not None
            and progress >= options.adversarial_start - options.discriminator_lead
        ):
            optimizer = self.optimizers["discriminator"]
            optimizer.zero_grad(set_to_none=True)
            loss = self.discriminator.loss(batch, decoded, options.lecam_weight)
            loss.backward()
            optimizer.step()
            measures["discriminator"] = float(loss.detach())
        return measures

    def state(self) -> dict[str, Tensor]:
        """All that :meth:`update` and :meth:`terms` change, flat, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, module in self._modules().items():
            tensors |= named(name, module.state_dict())
            tensors |= named(f"{name}_optimizer", optimizer_state(self.optimizers[name]))
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what :meth:`state` gave, from losses of the same options.

        A checkpoint of a run without them leaves them as they are, so that they can be switched on later.
        """
        for name, module in self._modules().items():
            own = part_of(tensors, name)
            if not own:
                continue
            module.load_state_dict(own)
            restore_optimizer(self.optimizers[name], part_of(tensors, f"{name}_optimizer"))

    def _modules(self) -> dict[str, nn.Module]:
        both = {"discriminator": self.discriminator, "semantic": self.semantic}
        return {name: module for name, module in both.items() if module is not None}


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(1, keepdim=True) + 1e-6).rsqrt()


def _gradient_norm(loss: Tensor, at: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, at, retain_graph=True)
    return gradient.norm().detach()
