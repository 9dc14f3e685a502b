"""The one typed configuration of a backbone, and its presets.

Defaults follow the table "option | article | report | default here" of ``docs/architecture.md``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RouterConfig(BaseModel):
    """How tokens choose experts (ERNIE 5.0 report, section 3.2; Wang et al., arXiv 2408.15664).

    ``bias_speed`` moves the selection bias of loss-free balancing after each step; short runs need a
    larger one than the report's 1e-4.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    score: Literal["softmax", "sigmoid"] = "softmax"
    bias_speed: float = Field(default=1e-3, ge=0)
    auxiliary_weight: float = Field(default=0.0, ge=0)
    z_weight: float = Field(default=0.0, ge=0)


class ElasticConfig(BaseModel):
    """Sampling of sub-networks in training (article section 1; report section 3.3).

    Each axis is reduced with its probability: depth once per packed row, width once per sample, top_k once
    per sample and layer. The three are independent.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    depth_probability: float = Field(default=0.25, ge=0, le=1)
    depth_range: tuple[float, float] = (0.3, 0.7)
    width_probability: float = Field(default=0.2, ge=0, le=1)
    width_range: tuple[float, float] = (0.3, 0.5)
    top_k_probability: float = Field(default=0.2, ge=0, le=1)

    @classmethod
    def off(cls) -> ElasticConfig:
        """Always the full network."""
        return cls(depth_probability=0, width_probability=0, top_k_probability=0)


class BackboneConfig(BaseModel):
    """Shape and options of the network.

    Attributes:
        layers, width, heads, key_heads, head_dim: of the transformer.
        experts, top_k, expert_width: of the sparse feed-forward of every layer.
        shared_expert_width: of an always-on expert; 0 for none.
        text_vocabulary: V of the text tokenizer; markers come on top.
        bits: of one visual code.
        audio_levels, audio_codebook: residual levels predicted, codes per level.
        audio_layers: H, the top layers that carry the audio heads; like the first one they are never skipped.
        features: named understanding encoders of pictures and their widths.
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
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs")
        low, high = self.elastic.depth_range
        if not 0 < low <= high <= 1:
            raise ValueError(f"depth_range {self.elastic.depth_range} is not within (0, 1]")
        if self.audio_layers >= self.layers:
            raise ValueError(f"audio_layers {self.audio_layers} must be below layers {self.layers}")
        return self

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
