"""The sparse feed-forward: experts of SwiGLU behind a router."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.model.allocation import fitting_limit, initial_limits
from ernie5.backbone.model.router import Routing, account, bias_step, decide, group_mask, orthogonality
from ernie5.kernels.experts import sparse_swiglu

__all__ = ["Routing", "SparseFeedForward"]


class SparseFeedForward(nn.Module):
    """Router, E experts of SwiGLU, and an optional shared expert that always runs."""

    def __init__(self, config: BackboneConfig, layer: int = 0) -> None:
        super().__init__()
        self.top_k, self.router_config = config.top_k, config.router
        experts, width, hidden = config.experts, config.width, config.expert_width
        self.router = nn.Parameter(torch.empty(experts, width))
        self.selection_bias: Tensor
        self.register_buffer("selection_bias", torch.zeros(experts))
        self.groups: Tensor | None
        isolated = config.router.pool == "isolated"
        self.register_buffer("groups", group_mask(config) if isolated else None, persistent=False)
        # What a dynamic allocation needs exists only with it: weights of a fixed one stay as they were.
        allocation = config.router.allocation
        self.price_limit: Tensor | None
        limit = None if allocation.policy == "fixed" else initial_limits(allocation)
        self.register_buffer("price_limit", limit)
        nulls = allocation.null_experts if allocation.policy == "null" else 0
        self.null_router = nn.Parameter(torch.empty(nulls, width)) if nulls else None
        guesses = allocation.policy != "fixed" and allocation.complexity_weight > 0
        self.complexity = nn.Parameter(torch.empty(width)) if guesses else None
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        shared = config.shared_width(layer)
        self.shared_gate_up = nn.Parameter(torch.empty(2 * shared, width)) if shared else None
        self.shared_down = nn.Parameter(torch.empty(width, shared)) if shared else None

    def forward(self, x_Td: Tensor, routing: Routing, layer: int) -> Tensor:
        """Tokens ``[T, d]`` in the compute dtype to float32 ``[T, d]``."""
        dtype = x_Td.dtype
        active = None if routing.experts is None else routing.experts[layer]
        router: Tensor = self.router
        bias = self.selection_bias
        groups = self.groups
        if active is not None:
            router, bias = router[active], bias[active]
            groups = None if groups is None else groups[:, active]
        x_float = x_Td.float()
        estimate = None
        if self.complexity is not None:
            estimate = x_float.detach() @ self.complexity.float() * len(self.complexity) ** -0.5
            if routing.counted is not None:
                routing.estimates[layer] = estimate
        top_k = self.top_k if routing.fixed_top_k is None else routing.fixed_top_k[layer]
        decision = decide(
            F.linear(x_float, router.float()),
            bias,
            self.router_config,
            routing,
            layer,
            top_k=min(top_k, len(router)),
            slots=self.top_k,
            groups=groups,
            null_logits=None if self.null_router is None else F.linear(x_float, self.null_router.float()),
            limit=self.price_limit,
            estimate=estimate,
        )
        account(decision, self.router_config, routing, layer, groups)
        if self.router_config.orthogonality_weight and routing.counted is not None:
            routing.auxiliary.append(self.router_config.orthogonality_weight * orthogonality(router))
        expert = decision.expert if active is None else active[decision.expert]
        out = self.mix(x_Td, expert, decision.weight, decision.valid)
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = F.linear(x_Td, self.shared_gate_up.to(dtype)).chunk(2, -1)
            out = out + F.linear(F.silu(gate) * up, self.shared_down.to(dtype)).float()
        return out

    def mix(self, x_Td: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, valid_Tk: Tensor | None) -> Tensor:
        """The chosen experts' outputs, weighted and summed: float32 ``[T, d]``. Ids count all experts."""
        return sparse_swiglu(x_Td, self.gate_up, self.down, expert_Tk, weight_Tk, valid_Tk)

    @torch.no_grad()
    def balance(self, load: Tensor) -> None:
        """Move the selection bias towards equal load by the sign of each expert's deficit."""
        groups = None if self.groups is None else list(self.groups)
        self.selection_bias += self.router_config.bias_speed * bias_step(load, groups)

    @torch.no_grad()
    def hold_budget(self, prices: Tensor, share: float | None = None) -> None:
        """Move the limits of a dynamic allocation towards those that fit a step's prices, ``[G, bins]``.

        ``share`` is that of the way; None takes the configured ``speed``.
        """
        assert self.price_limit is not None
        allocation = self.router_config.allocation
        share = allocation.speed if share is None else share
        for number, histogram in enumerate(prices):
            fitting = fitting_limit(histogram, allocation, self.top_k)
            if fitting is not None:
                self.price_limit[number] += share * (fitting - self.price_limit[number])
