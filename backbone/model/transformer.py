"""The backbone: embeddings, elastic layers, heads.

The text path is the Ernie4.5-MoE network: RMSNorm before each half of a block, grouped-query attention with
RoPE, SwiGLU experts, a selection bias apart from the combine weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.model.attention import Attend, Attention
from ernie5.backbone.model.embeddings import Embeddings
from ernie5.backbone.model.experts import Routing, SparseFeedForward
from ernie5.backbone.model.heads import AudioCodes, Heads, TeacherForcing
from ernie5.backbone.model.regions import Regions
from ernie5.backbone.model.rope import rotation
from ernie5.backbone.rows import RowBatch
from ernie5.kernels.flashmask import flashmask_attention

_PLAIN = Regions()


class Block(nn.Module):
    """One pre-norm layer: attention, then the sparse feed-forward."""

    def __init__(self, config: BackboneConfig, layer: int = 0) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.attention_norm = nn.Parameter(torch.ones(config.width))
        self.attention = Attention(config)
        self.feed_forward_norm = nn.Parameter(torch.ones(config.width))
        self.feed_forward = SparseFeedForward(config, layer)

    def forward(
        self,
        x_BNd: Tensor,
        turn: Tensor,
        attend: Attend,
        routing: Routing,
        layer: int,
        dtype: torch.dtype,
        regions: Regions = _PLAIN,
    ) -> Tensor:
        attention, epsilon = self.attention, self.epsilon
        query, key, value = regions.attention_inputs(
            x_BNd,
            turn,
            self.attention_norm,
            attention.qkv,
            epsilon,
            attention.heads,
            attention.key_heads,
            dtype,
        )
        mixed = attend(layer, query, key, value)
        x_BNd, normed = regions.attention_outputs(
            x_BNd, mixed, attention.out, self.feed_forward_norm, epsilon, dtype
        )
        return x_BNd + self.feed_forward(normed.flatten(0, 1), routing, layer).view_as(x_BNd)


@dataclass
class Outputs:
    """What is known at the positions that predict something.

    ``text_hidden`` ``[n, d]`` in the compute dtype and ``text_head`` ``[V + markers, d]`` give the text
    logits, ``bits`` ``[c, bits]`` (log-odds of a set bit), ``audio`` per level ``[a, codebook + 1]``,
    ``hidden`` ``[B, N, d]`` after the final norm.
    """

    text_hidden: Tensor
    text_head: Tensor
    bits: Tensor
    audio: list[Tensor]
    hidden: Tensor

    @cached_property
    def text(self) -> Tensor:
        """float32 text logits ``[n, V + markers]``, made when asked for: the loss does without them."""
        with torch.inference_mode(self.text_hidden.is_inference()):
            return F.linear(self.text_hidden, self.text_head.to(self.text_hidden.dtype)).float()


class Backbone(nn.Module):
    """The unified model. ``compute_dtype`` is that of the matrix products; weights stay float32.

    ``regions`` are its dense parts, as they are or compiled; see
    :func:`~ernie5.backbone.model.placement.place`.
    """

    def __init__(self, config: BackboneConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.regions = _PLAIN
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.layers)])
        self.final_norm = nn.Parameter(torch.ones(config.width))
        self.heads = Heads(config)
        self.initialise(seed)

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return self.embeddings.token.device

    def feed_forward(self, layer: int) -> SparseFeedForward:
        """The sparse feed-forward of a layer."""
        found = self.layers[layer].feed_forward
        assert isinstance(found, SparseFeedForward)
        return found

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal(0, 0.02 * sqrt(768 / width))-like weights; projections into the residual stream are scaled
        down with depth. A function of the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        base = 0.02 * math.sqrt(768 / self.config.width)
        for name, parameter in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf in ("attention_norm", "feed_forward_norm", "final_norm", "norm"):
                continue
            if ".norm." in name or ".out_norm." in name:
                continue
            if leaf == "bias" or ".place." in name:
                parameter.zero_()
                continue
            deviation = base
            if leaf in ("down", "shared_down") or name.endswith("attention.out"):
                deviation = base / math.sqrt(2 * self.config.layers)
            values = torch.randn(parameter.shape, generator=generator) * deviation
            parameter.copy_(values)

    def forward(
        self, batch: RowBatch, *, layers: Sequence[int] | None = None, routing: Routing | None = None
    ) -> Outputs:
        """Packed rows to logits; ``layers`` lists those to run, ascending (all by default)."""
        plan = batch.plan()
        routing = routing or Routing()
        if routing.group is None:
            routing.group = batch.group.flatten()

        def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return flashmask_attention(query, key, value, plan=plan)

        teacher = TeacherForcing(batch.audio_at, batch.audio_target)
        hidden = self.run(
            self.embeddings(batch),
            batch.positions,
            attend,
            routing,
            layers=layers,
            audio=teacher,
        )
        flat = hidden.flatten(0, 1)
        return Outputs(
            text_hidden=flat.index_select(0, batch.text_at).to(self.compute_dtype),
            text_head=self.embeddings.token,
            bits=self.heads.bits(flat.index_select(0, batch.bits_at)),
            audio=teacher.logits,
            hidden=hidden,
        )

    def run(
        self,
        x_BNd: Tensor,
        positions: Tensor,
        attend: Attend,
        routing: Routing,
        *,
        layers: Sequence[int] | None = None,
        audio: AudioCodes | None = None,
    ) -> Tensor:
        """Embedded inputs through the chosen layers; hidden states ``[B, N, d]`` after the final norm."""
        regions = self.regions
        turn = regions.rotation(rotation(positions, self.config.head_dim, self.config.rope_theta))
        for index in range(self.config.layers) if layers is None else layers:
            x_BNd = self.layers[index](x_BNd, turn, attend, routing, index, self.compute_dtype, regions)
            if audio is not None:
                flat = self.heads.audio(x_BNd.flatten(0, 1), index, audio, regions.audio_logits)
                x_BNd = flat.view_as(x_BNd)
        return F.rms_norm(x_BNd, x_BNd.shape[-1:], self.final_norm, self.config.norm_epsilon)

    def text_logits(self, hidden: Tensor) -> Tensor:
        """float32 logits over text ids and markers; the head is tied to the token embedding."""
        dtype = self.compute_dtype
        return F.linear(hidden.to(dtype), self.embeddings.token.to(dtype)).float()
