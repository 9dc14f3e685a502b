"""The router and the sparse feed-forward.

Selection adds a bias to the scores, combine weights do not (Wang et al., arXiv 2408.15664; ERNIE 4.5). The
router sees only the token's representation, no modality (ERNIE 5.0 report, section 2.1). No token is
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
from ernie5.kernels.experts import sparse_swiglu


@dataclass
class Routing:
    """Which experts the tokens of one call may use, and what became of it.

    Attributes:
        expert_mask: bool ``[S, L, E]`` per sample and layer; None allows all.
        top_k: int64 ``[S, L]`` per sample and layer; None uses the model's.
        sample: int64 ``[T]``, the sample of each token; needed with the two above.
        experts: per layer the int64 ids in play, or None for all: a fixed sub-network. The router's rows are
            sliced before its product, so an extracted sub-model computes the very same numbers.
        fixed_top_k: k of a fixed sub-network, per layer or None.
        counted: bool ``[T]``: tokens that count as load; padding does not.
        load: per layer, tokens that chose each expert ``[E]`` among the counted full-width ones.
        choices: per layer ``[T, k]`` chosen experts, -1 where a slot is off; kept when ``keep_choices``.
    """

    expert_mask: Tensor | None = None
    top_k: Tensor | None = None
    sample: Tensor | None = None
    experts: list[Tensor | None] | None = None
    fixed_top_k: list[int] | None = None
    counted: Tensor | None = None
    keep_choices: bool = False
    load: dict[int, Tensor] = field(default_factory=dict)
    choices: dict[int, Tensor] = field(default_factory=dict)
    auxiliary: list[Tensor] = field(default_factory=list)


class SparseFeedForward(nn.Module):
    """Router, E experts of SwiGLU, and an optional shared expert that always runs."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.top_k, self.router_config = config.top_k, config.router
        experts, width, hidden = config.experts, config.width, config.expert_width
        self.router = nn.Parameter(torch.empty(experts, width))
        self.selection_bias: Tensor
        self.register_buffer("selection_bias", torch.zeros(experts))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        shared = config.shared_expert_width
        self.shared_gate_up = nn.Parameter(torch.empty(2 * shared, width)) if shared else None
        self.shared_down = nn.Parameter(torch.empty(width, shared)) if shared else None

    def forward(self, x_Td: Tensor, routing: Routing, layer: int) -> Tensor:
        """Tokens ``[T, d]`` in the compute dtype to float32 ``[T, d]``."""
        dtype = x_Td.dtype
        active = None if routing.experts is None else routing.experts[layer]
        router: Tensor = self.router
        gate_up: Tensor = self.gate_up
        down: Tensor = self.down
        bias = self.selection_bias
        if active is not None:
            router, bias = router[active], bias[active]
            gate_up, down = gate_up[active], down[active]
        logits = F.linear(x_Td.float(), router.float())
        scores = torch.softmax(logits, -1) if self.router_config.score == "softmax" else torch.sigmoid(logits)
        top_k = self.top_k if routing.fixed_top_k is None else routing.fixed_top_k[layer]
        top_k = min(top_k, scores.shape[-1])
        ranked = scores.detach() + bias
        allowed = None
        if routing.expert_mask is not None:
            assert routing.sample is not None
            allowed = routing.expert_mask[:, layer].index_select(0, routing.sample)
            ranked = ranked.masked_fill(~allowed, -torch.inf)
        expert = ranked.topk(top_k, -1).indices
        weight = scores.gather(-1, expert)
        valid = None
        if routing.top_k is not None:
            assert routing.sample is not None
            limit = routing.top_k[:, layer].index_select(0, routing.sample)
            valid = torch.arange(top_k, device=expert.device) < limit[:, None]
            weight = weight * valid
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-12)
        self._account(routing, layer, logits, scores, expert, valid, allowed)
        out = sparse_swiglu(x_Td, gate_up.to(dtype), down.to(dtype), expert, weight, valid)
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = F.linear(x_Td, self.shared_gate_up.to(dtype)).chunk(2, -1)
            out = out + F.linear(F.silu(gate) * up, self.shared_down.to(dtype)).float()
        return out

    def _account(
        self,
        routing: Routing,
        layer: int,
        logits: Tensor,
        scores: Tensor,
        expert: Tensor,
        valid: Tensor | None,
        allowed: Tensor | None,
    ) -> None:
        slots = expert if valid is None else expert.masked_fill(~valid, -1)
        if routing.keep_choices:
            active = None if routing.experts is None else routing.experts[layer]
            kept = slots if active is None else torch.where(slots >= 0, active[slots.clamp(min=0)], -1)
            routing.choices[layer] = kept
        if routing.counted is None:
            return
        # Masked-out experts must not look idle to the balance: only full-width tokens count.
        counted = routing.counted if allowed is None else routing.counted & allowed.all(-1)
        chosen = slots[counted].flatten()
        routing.load[layer] = torch.bincount(chosen[chosen >= 0], minlength=scores.shape[-1])
        config = self.router_config
        if config.auxiliary_weight and bool(counted.any()):
            share = routing.load[layer] / routing.load[layer].sum().clamp(min=1)
            probability = (scores / scores.sum(-1, keepdim=True))[counted].mean(0)
            routing.auxiliary.append(config.auxiliary_weight * len(share) * (share * probability).sum())
        if config.z_weight:
            routing.auxiliary.append(
                config.z_weight * torch.logsumexp(logits, -1)[routing.counted].square().mean()
            )

    @torch.no_grad()
    def balance(self, load: Tensor) -> None:
        """Move the selection bias towards equal load by the sign of each expert's deficit."""
        load = load.float()
        self.selection_bias += self.router_config.bias_speed * torch.sign(load.mean() - load)
