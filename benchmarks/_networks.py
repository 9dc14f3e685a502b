"""The networks of the training benchmark: ours, and transformers' Ernie4.5-MoE as the same network.

Weights are copied from ours to theirs, so that the losses of all arms must agree: a comparison of two
different networks would say nothing. Multimodal rows reach transformers through our embeddings and leave it
through our heads; between them run its decoder layers, with the 4-D mask that packed rows need.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig, ElasticConfig, RouterConfig
from ernie5.backbone.layout import SampleLayout, lay_out
from ernie5.backbone.model.attention import Attend
from ernie5.backbone.model.experts import Routing
from ernie5.backbone.model.heads import TeacherForcing
from ernie5.backbone.model.transformer import Backbone, Outputs
from ernie5.backbone.objectives.next_group import LossWeights, loss_sums, weighted_loss
from ernie5.backbone.rows import RowBatch, pack
from ernie5.backbone.training.packing import pack_steps
from ernie5.corpora.corpus import open_corpus
from ernie5.kernels.cross_entropy import linear_cross_entropy
from ernie5.kernels.flashmask import MaskPlan, flashmask_attention
from ernie5.protocol.errors import ErnieMultiError
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.samples import Sample
from ernie5.protocol.tokens import TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import MARKER_SLOTS, UnifiedVocabulary
from ernie5.services.tokenizer_service import load_tokenizer

# A text embedding of 4096 rows, markers included, as the text-only comparison has.
_VOCABULARY = 4096 - MARKER_SLOTS


def text_config(width: int) -> BackboneConfig:
    """The shape compared with transformers: 4 layers, 16 experts of which 4 a token, one shared expert."""
    expert_width, key_heads = {64: (32, 1), 256: (256, 2), 768: (512, 4)}[width]
    return BackboneConfig(
        name=f"text-{width}",
        layers=4,
        width=width,
        heads=max(width // 64, 2),
        key_heads=key_heads,
        head_dim=64,
        experts=16,
        top_k=4,
        expert_width=expert_width,
        shared_expert_width=expert_width,
        text_vocabulary=_VOCABULARY,
        rope_theta=5e5,
        router=RouterConfig(bias_speed=0.0),
        elastic=ElasticConfig.off(),
    )


def multimodal_config(width: int, text_vocabulary: int = 8192) -> BackboneConfig:
    """The same layers for rows of the mini corpus, whose text tokenizer has ``text_vocabulary`` ids."""
    return text_config(width).model_copy(update={"text_vocabulary": text_vocabulary})


def corpus_rows(config: BackboneConfig, rows: int, length: int) -> list[list[SampleLayout]]:
    """Rows of ``length`` positions filled with shuffled samples of the mini corpus, tokenised here.

    Only full rows are returned: the one that was being filled when the others were full is left out.
    """
    corpus = open_corpus("mini")
    tokenizers = {service: load_tokenizer(service) for service in ("text", "audio", "vision")}
    vocabulary = UnifiedVocabulary(config.text_vocabulary)

    def encode(sample: Sample) -> TokenSequence:
        parts = []
        for segment in sample.segments:
            tokenizer = tokenizers[modality_of(segment.modality).service]
            (span,) = tokenizer.encode_segments([segment], features=True)
            if isinstance(span, ErnieMultiError):
                raise span
            assert isinstance(span, TokenSpan)
            parts.append(TokenSegment(span, segment.role))
        return TokenSequence(sample.sample_id, tuple(parts))

    order = np.random.default_rng(0).permutation(len(corpus))
    layouts = (
        (place, lay_out(encode(corpus[int(index)]), config, vocabulary)) for place, index in enumerate(order)
    )
    fitting = ((place, layout if len(layout) <= length else None) for place, layout in layouts)
    return next(pack_steps(fitting, rows, length)).rows


def packed_batch(
    rows: list[list[SampleLayout]], length: int, config: BackboneConfig, *, flat_positions: bool
) -> RowBatch:
    """Rows as tensors; ``flat_positions`` replaces Uni-RoPE's three coordinates by the row's own count.

    transformers' text network turns heads by one coordinate only.
    """
    batch = pack(rows, length, config)
    if flat_positions:
        count, length = batch.shape
        batch.positions = (
            torch.arange(length, dtype=torch.float32)[None, :, None].expand(count, length, 3).contiguous()
        )
    return batch


def dense_attend(mask: Tensor) -> Attend:
    """Attention as without a kernel of one's own: SDPA under a materialised bool ``[B, 1, N, N]``."""

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)

    return attend


def packed_loss(model: Backbone, batch: RowBatch) -> Tensor:
    """The next-group loss of multimodal rows, as the trainer computes it."""
    return _loss_of(model(batch), batch, model.config)


def dense_loss(model: Backbone, batch: RowBatch) -> Tensor:
    """:func:`packed_loss` under a dense mask instead of ours, made anew as every step has new rows."""
    attend = dense_attend(batch.plan().dense())

    def body(x: Tensor, audio: TeacherForcing) -> Tensor:
        return model.run(x, batch.positions, attend, Routing(), audio=audio)

    return _loss_of(_outputs(model, batch, body), batch, model.config)


def _outputs(model: Backbone, batch: RowBatch, body: Callable[[Tensor, TeacherForcing], Tensor]) -> Outputs:
    teacher = TeacherForcing(batch.audio_at, batch.audio_target)
    hidden = body(model.embeddings(batch), teacher)
    flat = hidden.flatten(0, 1)
    return Outputs(
        text_hidden=flat.index_select(0, batch.text_at),
        text_head=model.embeddings.token,
        bits=model.heads.bits(flat.index_select(0, batch.bits_at)),
        audio=teacher.logits,
        hidden=hidden,
    )


def _loss_of(outputs: Outputs, batch: RowBatch, config: BackboneConfig) -> Tensor:
    sums = loss_sums(outputs, batch)
    return weighted_loss(sums, sums.count, config, LossWeights())


def text_loss(model: Backbone, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token on plain causal rows ``[B, N]`` of ids, tied head."""
    rows, length = ids.shape
    positions = torch.arange(length, dtype=torch.float32)[None, :, None].expand(rows, length, 3)
    column = torch.arange(length, dtype=torch.int32)
    intervals = torch.stack([torch.zeros_like(column), column], -1).view(1, 1, length, 1, 2)
    plan = MaskPlan.from_intervals(intervals.expand(rows, -1, -1, -1, -1), length)

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flashmask_attention(query, key, value, plan=plan)

    hidden = model.run(F.embedding(ids, model.embeddings.token), positions, attend, Routing())
    wanted = ids[:, 1:].flatten()
    hidden = hidden[:, :-1].flatten(0, 1).to(model.compute_dtype)
    share = torch.full(wanted.shape, 1 / len(wanted))
    return linear_cross_entropy(hidden, model.embeddings.token, wanted, share)


def text_parameters(model: Backbone) -> list[nn.Parameter]:
    """Parameters that a text-only step moves."""
    return [model.embeddings.token, model.final_norm, *model.layers.parameters()]


class Twin:
    """transformers' ``Ernie4_5_MoeForCausalLM`` with the weights of a :class:`Backbone`.

    Raises:
        ImportError: transformers is not installed (the ``bench`` extra).
    """

    def __init__(self, model: Backbone) -> None:
        _let_transformers_load()
        from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

        config = model.config
        self.ours = model
        self.network: Any = Ernie4_5_MoeForCausalLM(
            Ernie4_5_MoeConfig(
                vocab_size=UnifiedVocabulary(config.text_vocabulary).size,
                hidden_size=config.width,
                intermediate_size=2 * config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.key_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.norm_epsilon,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=True,
                moe_intermediate_size=config.expert_width,
                moe_k=config.top_k,
                moe_num_experts=config.experts,
                moe_num_shared_experts=config.shared_expert_width // config.expert_width,
                moe_layer_start_index=0,
                max_position_embeddings=8192,
                pad_token_id=None,
            )
        )
        self.network.load_state_dict(_state_of(model), strict=False)
        self.network.train()

    @property
    def experts(self) -> str:
        """How the experts run now; transformers' default until it is set."""
        return str(self.network.config._experts_implementation)

    @experts.setter
    def experts(self, implementation: str) -> None:
        self.network.set_experts_implementation(implementation)

    def text_loss(self, ids: Tensor) -> Tensor:
        """As :func:`text_loss`."""
        logits = self.network(ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def packed_loss(self, batch: RowBatch) -> Tensor:
        """As :func:`packed_loss`, with its decoder layers; rows must have flat positions."""
        ours, config, decoder = self.ours, self.ours.config, self.network.model
        mask = batch.plan().dense()
        position = batch.positions[..., 0].long()

        def body(x: Tensor, audio: TeacherForcing) -> Tensor:
            turns = decoder.rotary_emb(x, position)
            dtype = decoder.layers[0].input_layernorm.weight.dtype
            for index, layer in enumerate(decoder.layers):
                x = layer(x.to(dtype), attention_mask=mask, position_embeddings=turns, position_ids=position)
                x = ours.heads.audio(x.float().flatten(0, 1), index, audio).view_as(x)
            return F.rms_norm(x, x.shape[-1:], ours.final_norm, config.norm_epsilon)

        return _loss_of(_outputs(ours, batch, body), batch, config)

    def packed_parameters(self) -> list[nn.Parameter]:
        """Parameters that a step of :meth:`packed_loss` moves."""
        ours = self.ours
        own = [*ours.embeddings.parameters(), *ours.heads.parameters(), ours.final_norm]
        return [*own, *(p for p in self.network.model.layers.parameters() if p.requires_grad)]


def _let_transformers_load() -> None:
    """Hide a torchaudio that can't load: transformers imports it for features not used here.

    The wheels of the package index link CUDA, and fail beside a CPU build of torch.
    """
    try:
        import torchaudio  # noqa: F401
    except ImportError:
        pass
    except OSError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
            del sys.modules[name]
        empty = types.ModuleType("torchaudio")
        empty.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = empty


def _state_of(model: Backbone) -> dict[str, Tensor]:
    config = model.config
    sizes = [config.heads * config.head_dim, *[config.key_heads * config.head_dim] * 2]
    state = {
        "model.embed_tokens.weight": model.embeddings.token,
        "lm_head.weight": model.embeddings.token,
        "model.norm.weight": model.final_norm,
    }
    for index, block in enumerate(model.layers):
        prefix, feed = f"model.layers.{index}", model.feed_forward(index)
        for name, part in zip("qkv", block.attention.qkv.split(sizes)):  # type: ignore[union-attr, operator]
            state[f"{prefix}.self_attn.{name}_proj.weight"] = part
        gate, up = feed.shared_gate_up.chunk(2)  # type: ignore[union-attr]
        state |= {
            f"{prefix}.self_attn.o_proj.weight": block.attention.out,  # type: ignore[union-attr]
            f"{prefix}.input_layernorm.weight": block.attention_norm,
            f"{prefix}.post_attention_layernorm.weight": block.feed_forward_norm,
            f"{prefix}.mlp.gate.weight": feed.router,
            f"{prefix}.mlp.gate.moe_statics.e_score_correction_bias": feed.selection_bias[None],
            f"{prefix}.mlp.experts.gate_up_proj": feed.gate_up,
            f"{prefix}.mlp.experts.down_proj": feed.down,
            f"{prefix}.mlp.shared_experts.gate_proj.weight": gate,
            f"{prefix}.mlp.shared_experts.up_proj.weight": up,
            f"{prefix}.mlp.shared_experts.down_proj.weight": feed.shared_down,
        }
    return {name: value.detach().clone() for name, value in state.items()}
