"""The one typed configuration of a backbone, and its presets.

Defaults follow the table "option | article | report | default here" of ``docs/architecture.md``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AllocationConfig(BaseModel):
    """How many experts each token gets (article II, section 2.1).

    ``fixed`` gives every token ``top_k``. The two others give between ``least`` and ``top_k``, by need:

    * ``threshold``: the fewest experts whose scores add up to a threshold (Huang et al., arXiv 2403.07652),
      so a token the router is sure about gets one or two and one that many experts claim gets more.
    * ``null``: ``null_experts`` that compute nothing compete for the slots (AdaMoE, arXiv 2406.13233).

    A controller moves the threshold, or the bias of the null experts, so that the mean over the training
    tokens is ``budget``: in every layer (``scope`` layer), or over the model, so that layers compete for the
    budget. With ``by_kind`` it holds for each kind of position by itself (text, understood pictures,
    generated pictures, sounds), and so for any mix of them, whatever was trained on. ``speed`` is the share
    of the way to the value that fits the step's tokens.

    What a router is sure of need not be easy. With ``complexity_weight`` each layer also guesses how hard a
    token is, from its representation, and moves that token's threshold (or its null experts' bias)
    accordingly: by so many nats from the easiest to the hardest of its modality.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Literal["fixed", "threshold", "null"] = "fixed"
    budget: float = Field(default=2.0, ge=1)
    least: int = Field(default=1, ge=1)
    scope: Literal["layer", "model"] = "layer"
    by_kind: bool = True
    null_experts: int = Field(default=8, ge=1)
    speed: float = Field(default=0.3, gt=0, le=1)
    complexity_weight: float = Field(default=4.0, ge=0)


class RouterConfig(BaseModel):
    """How tokens choose experts (ERNIE 5.0 report, section 3.2; Wang et al., arXiv 2408.15664).

    Attributes:
        pool: ``shared``: all kinds of position draw on all experts and the router knows no modality (the
            report); ``isolated``: each kind has experts of its own (article II, section 1.2).
        isolated_experts: how many those are for text, understood pictures, generated pictures and sounds;
            None divides the experts evenly.
        bias_speed: moves the selection bias of loss-free balancing after each step; short runs need a larger
            one than the report's 1e-4.
        auxiliary_weight, z_weight: of the balance loss (Switch, arXiv 2101.03961) and the z loss (ST-MoE,
            arXiv 2202.08906).
        orthogonality_weight: of the mean squared cosine between the router's rows (ERNIE 4.5).
        round_robin_steps: during the first n steps tokens go to their allowed experts in turn, weighted by
            the router's scores, so that no expert starves before the router knows anything; over the next n
            the share of such tokens falls to nothing.
        allocation: experts a token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pool: Literal["shared", "isolated"] = "shared"
    isolated_experts: tuple[int, int, int, int] | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"
    bias_speed: float = Field(default=1e-3, ge=0)
    auxiliary_weight: float = Field(default=0.0, ge=0)
    z_weight: float = Field(default=0.0, ge=0)
    orthogonality_weight: float = Field(default=0.0, ge=0)
    round_robin_steps: int = Field(default=0, ge=0)
    allocation: AllocationConfig = AllocationConfig()


class ElasticConfig(BaseModel):
    """Sampling of sub-networks in training (article section 1; report section 3.3).

    Each axis is reduced with its probability, independently of the others.

    Attributes:
        depth_range, width_range: share of the layers and of the experts that a reduced draw keeps, uniform.
        top_k_range: reduced experts a token, both ends included; None is 1 to ``top_k`` - 1.
        depth_scope: what shares one depth draw: a packed ``row``, or the whole ``batch`` of a step.
        width_scope: a ``sample`` (its layers draw their own subsets), or the ``batch``.
        top_k_scope: each ``layer`` of each sample, a ``sample``, or the ``batch``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    depth_probability: float = Field(default=0.25, ge=0, le=1)
    depth_range: tuple[float, float] = (0.3, 0.7)
    depth_scope: Literal["row", "batch"] = "row"
    width_probability: float = Field(default=0.2, ge=0, le=1)
    width_range: tuple[float, float] = (0.3, 0.5)
    width_scope: Literal["sample", "batch"] = "sample"
    top_k_probability: float = Field(default=0.2, ge=0, le=1)
    top_k_range: tuple[int, int] | None = None
    top_k_scope: Literal["layer", "sample", "batch"] = "layer"

    @model_validator(mode="after")
    def _ranges(self) -> ElasticConfig:
        for name in ("depth_range", "width_range"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ValueError(f"{name} ({low}, {high}) is not within (0, 1] from low to high")
        if self.top_k_range is not None and not 1 <= self.top_k_range[0] <= self.top_k_range[1]:
            raise ValueError(f"top_k_range {self.top_k_range} does not run from 1 or more upwards")
        return self

    @classmethod
    def off(cls) -> ElasticConfig:
        """Always the full network."""
        return cls(depth_probability=0, width_probability=0, top_k_probability=0)

    @classmethod
    def article(cls) -> ElasticConfig:
        """The article's draws: one for the whole batch, a single expert a token when that is reduced."""
        return cls(depth_scope="batch", width_scope="batch", top_k_scope="batch", top_k_range=(1, 1))

    @classmethod
    def report(cls, layers: int, audio_layers: int) -> ElasticConfig:
        """The report's: per instance, any number of layers from those that always run, half the experts.

        An instance's depth draw is that of its row, for a row runs together; with one sample a row it is
        the report's.
        """
        least = (1 + audio_layers) / layers
        return cls(depth_range=(least, 1.0), width_range=(0.5, 0.5), top_k_scope="sample")


class BackboneConfig(BaseModel):
    """Shape and options of the network.

    Attributes:
        layers, width, heads, key_heads, head_dim: of the transformer.
        experts, top_k, expert_width: of the sparse feed-forward of every layer.
        shared_expert_width: of an always-on expert; 0 for none.
        shared_expert_widths: the same layer by layer where it differs: dense layers of an imported network.
        text_vocabulary: V of the text tokenizer; markers come on top.
        bits: of one visual code.
        audio_levels, audio_codebook: residual levels predicted, codes per level.
        audio_layers: H, the top layers that carry the audio heads; like the first one they are never skipped.
        features: named understanding encoders of pictures and their widths: ``cnn``, the tokenizer's own,
            and ``vit``, the semantic one, where the vision service is set to give it.
        sound_features: those of sounds, added to the code embeddings of understood frames; may be empty.
        rope_theta: base of the rotary angles.
        audio_mask: ``causal``, or ``sparse``: a sliding window over frames plus global anchor frames.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "custom"
    layers: int = Field(default=8, ge=2)
    width: int = Field(default=256, ge=8)
    heads: int = Field(default=8, ge=1)
    key_heads: int = Field(default=4, ge=1)
    head_dim: int = Field(default=32, ge=8)
    experts: int = Field(default=16, ge=1)
    top_k: int = Field(default=4, ge=1)
    expert_width: int = Field(default=128, ge=8)
    shared_expert_width: int = Field(default=0, ge=0)
    shared_expert_widths: tuple[int, ...] | None = None
    text_vocabulary: int = Field(default=8192, ge=1)
    bits: int = Field(default=16, ge=1, le=32)
    audio_levels: int = Field(default=8, ge=1)
    audio_codebook: int = Field(default=256, ge=2)
    audio_layers: int = Field(default=1, ge=1)
    features: dict[str, int] = Field(default_factory=lambda: {"cnn": 96})
    sound_features: dict[str, int] = Field(default_factory=lambda: {"codec": 48})
    rope_theta: float = Field(default=1e4, gt=1)
    norm_epsilon: float = Field(default=1e-5, gt=0)
    audio_mask: Literal["causal", "sparse"] = "causal"
    audio_window: int = Field(default=25, ge=1)
    audio_anchor_every: int = Field(default=25, ge=1)
    router: RouterConfig = RouterConfig()
    elastic: ElasticConfig = ElasticConfig()

    @model_validator(mode="after")
    def _consistent(self) -> BackboneConfig:
        if self.heads % self.key_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of key_heads {self.key_heads}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} exceeds experts {self.experts}")
        widths = self.shared_expert_widths
        if widths is not None and (len(widths) != self.layers or min(widths) < 0):
            raise ValueError(
                f"shared_expert_widths {widths} must hold a width for each of {self.layers} layers"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs")
        if self.audio_layers >= self.layers:
            raise ValueError(f"audio_layers {self.audio_layers} must be below layers {self.layers}")
        fewer = self.elastic.top_k_range
        if fewer is not None and fewer[1] >= max(self.top_k, 2):
            raise ValueError(f"top_k_range {fewer} reaches top_k {self.top_k}; a reduced draw must lie below")
        if self.router.pool == "isolated":
            shares = self.expert_shares
            if sum(shares) != self.experts or min(shares) < self.top_k:
                raise ValueError(
                    f"isolated_experts {shares} must add up to experts {self.experts}, none below "
                    f"top_k {self.top_k}; give more experts or a smaller top_k"
                )
        allocation = self.router.allocation
        if allocation.policy == "null" and allocation.null_experts < self.top_k - allocation.least:
            raise ValueError(
                f"{allocation.null_experts} null experts can't empty the {self.top_k - allocation.least} "
                "slots between least and top_k; raise null_experts"
            )
        return self

    def check_trainable(self) -> None:
        """Refuse what answers (a sub-model may have fewer layers or a smaller k) but can't be trained.

        Raises:
            ValueError: depth draws below the layers that always run, or a budget outside [least, top_k].
        """
        elastic, allocation = self.elastic, self.router.allocation
        least = len(self.kept_layers)
        if elastic.depth_probability and least > elastic.depth_range[0] * self.layers + 1e-9:
            raise ValueError(
                f"depth draws keep {elastic.depth_range[0]:g} x {self.layers} layers at least, but the first "
                f"one and the top {self.audio_layers} always run; raise depth_range to "
                f"{least / self.layers:g}, or give more layers"
            )
        if allocation.policy != "fixed" and not allocation.least <= allocation.budget <= self.top_k:
            raise ValueError(
                f"a budget of {allocation.budget:g} experts a token is outside [{allocation.least}, "
                f"{self.top_k}], from least to top_k"
            )

    @property
    def expert_shares(self) -> tuple[int, ...]:
        """How many experts each kind of position has to itself in an isolated pool, in the order of
        :data:`~ernie5.backbone.rows.GROUPS`; the first ones get what doesn't divide."""
        if self.router.isolated_experts is not None:
            return self.router.isolated_experts
        return tuple(self.experts // 4 + (group < self.experts % 4) for group in range(4))

    def shared_width(self, layer: int) -> int:
        """Width of the always-on expert of a layer; 0 for none."""
        widths = self.shared_expert_widths
        return self.shared_expert_width if widths is None else widths[layer]

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Layers that no depth draw skips: the first one and the top ``audio_layers``."""
        return (0, *range(self.layers - self.audio_layers, self.layers))

    @property
    def levels_of_layer(self) -> dict[int, tuple[int, ...]]:
        """Which audio levels are predicted after which layer: spread evenly over the top layers."""
        first = self.layers - self.audio_layers
        table: dict[int, tuple[int, ...]] = {}
        for level in range(self.audio_levels):
            layer = first + level * self.audio_layers // self.audio_levels
            table[layer] = (*table.get(layer, ()), level)
        return table


PRESETS: dict[str, BackboneConfig] = {
    # For tests: everything in it, as small as it goes.
    "nano": BackboneConfig(
        name="nano",
        layers=4,
        width=64,
        heads=2,
        key_heads=1,
        head_dim=32,
        experts=8,
        top_k=2,
        expert_width=32,
        # The two layers that always run are half of it.
        elastic=ElasticConfig(depth_range=(0.5, 0.75)),
    ),
    # Trains in minutes on two CPU cores.
    "mini": BackboneConfig(name="mini", width=192, heads=6, key_heads=3, head_dim=32, expert_width=96),
    "base": BackboneConfig(
        name="base",
        layers=12,
        width=768,
        heads=12,
        key_heads=4,
        head_dim=64,
        experts=32,
        top_k=4,
        expert_width=384,
        audio_layers=2,
        rope_theta=1e6,
    ),
    # The shape of the report's ablation study (section 6.4.2): 64 experts, top-8, 16 layers.
    "report-16l": BackboneConfig(
        name="report-16l",
        layers=16,
        width=1024,
        heads=16,
        key_heads=4,
        head_dim=64,
        experts=64,
        top_k=8,
        expert_width=896,
        audio_layers=3,
        rope_theta=1e6,
        router=RouterConfig(bias_speed=1e-4),
    ),
}


def preset(name: str) -> BackboneConfig:
    """The preset called ``name``; ``ValueError`` lists the known ones."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}") from None
