"""The router: which experts a token goes to, with what weights, and what that does to the balance.

Selection adds a bias to the scores, combine weights do not (Wang et al., arXiv 2408.15664; ERNIE 4.5). In a
shared pool the router sees only the token's representation, no modality (ERNIE 5.0 report, section 2.1);
in an isolated one each kind of position chooses among its own experts. No token is dropped.

Shape letters: T tokens, E experts, k slots a token, S samples, L layers, G kinds of position, n null experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.config import BackboneConfig, RouterConfig
from ernie5.backbone.execution import moved
from ernie5.backbone.model.allocation import (
    count_prices,
    limits_of,
    null_prices,
    open_slots,
    threshold_prices,
)


@dataclass
class Routing:
    """Which experts the tokens of one call may use, and what became of it.

    Attributes:
        expert_mask: bool ``[S, L, E]`` per sample and layer; None allows all.
        top_k: int64 ``[S, L]`` per sample and layer; None uses the model's.
        sample: int64 ``[T]``, the sample of each token; needed with the two above.
        group: ``[T]``, the kind of position of each token; needed where the pool is isolated or the budget of
            a dynamic allocation held by kind.
        experts: per layer the int64 ids in play, or None for all: a fixed sub-network. The router's rows are
            sliced before its product, so an extracted sub-model computes the very same numbers.
        fixed_top_k: k of a fixed sub-network, per layer or None.
        round_robin, turn: share of the tokens that go to their experts in turn, and the step, which shifts
            the turns.
        counted: bool ``[T]``: tokens that count as load; padding does not.
        load: per layer, tokens that chose each expert ``[E]`` among the counted full-width ones.
        opened: per layer, float64 ``[2]``: experts that those tokens need, and their number.
        prices: per layer, the histograms that move the limits of a dynamic allocation.
        estimates: per layer, float32 ``[T]``, how hard it guessed each token to be; kept where load is
            counted.
        choices: per layer ``[T, k]`` chosen experts, -1 where a slot is off; kept when ``keep_choices``.
    """

    expert_mask: Tensor | None = None
    top_k: Tensor | None = None
    sample: Tensor | None = None
    group: Tensor | None = None
    experts: list[Tensor | None] | None = None
    fixed_top_k: list[int] | None = None
    round_robin: float = 0.0
    turn: int = 0
    counted: Tensor | None = None
    keep_choices: bool = False
    load: dict[int, Tensor] = field(default_factory=dict)
    opened: dict[int, Tensor] = field(default_factory=dict)
    prices: dict[int, Tensor] = field(default_factory=dict)
    estimates: dict[int, Tensor] = field(default_factory=dict)
    choices: dict[int, Tensor] = field(default_factory=dict)
    auxiliary: list[Tensor] = field(default_factory=list)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Routing:
        """The same draws for tokens on ``device``; what becomes of them is noted here and there alike."""

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else moved(tensor, device, non_blocking=non_blocking)

        return replace(
            self,
            expert_mask=there(self.expert_mask),
            top_k=there(self.top_k),
            sample=there(self.sample),
            group=there(self.group),
            counted=there(self.counted),
            experts=None if self.experts is None else [there(ids) for ids in self.experts],
        )


@dataclass
class Decision:
    """What the router decided for the tokens of one layer.

    Attributes:
        expert, weight: int64 and float32 ``[T, k]``, best first.
        valid: bool ``[T, k]``, slots that are on; all, if None.
        logits, scores: ``[T, E]``.
        needed: int64 ``[T]``, slots a dynamic allocation opens, before a sub-network's own k cuts them.
        prices: ``[T, k]`` of a dynamic allocation.
        null_scores: ``[T, n]`` of the null experts, where there are any.
    """

    expert: Tensor
    weight: Tensor
    valid: Tensor | None
    logits: Tensor
    scores: Tensor
    needed: Tensor | None = None
    prices: Tensor | None = None
    null_scores: Tensor | None = None


def group_mask(config: BackboneConfig) -> Tensor:
    """bool ``[G, E]``: the experts of each kind of position in an isolated pool, side by side."""
    shares = torch.tensor(config.expert_shares)
    owner = torch.arange(len(shares)).repeat_interleave(shares)
    return owner == torch.arange(len(shares))[:, None]


def decide(
    logits: Tensor,
    bias: Tensor,
    config: RouterConfig,
    routing: Routing,
    layer: int,
    *,
    top_k: int,
    slots: int | None = None,
    groups: Tensor | None = None,
    null_logits: Tensor | None = None,
    limit: Tensor | None = None,
    estimate: Tensor | None = None,
) -> Decision:
    """Choose up to ``top_k`` of E experts for each token.

    Args:
        logits: float32 ``[T, E]``.
        bias: float32 ``[E]``, of the selection.
        slots: the most that a dynamic allocation may open: the k the model was trained with, where
            ``top_k`` is that of a sub-network.
        groups: bool ``[G, E]`` of an isolated pool.
        null_logits: float32 ``[T, n]`` of null experts.
        limit: ``[G]``, of the slots' prices, see :mod:`ernie5.backbone.model.allocation`.
        estimate: float32 ``[T]``, how hard each token is guessed to be.

    Raises:
        ValueError: the tokens' kinds are needed and not told, or an isolated pool has no expert left for one.
    """
    allowed = None
    if groups is not None:
        allowed = _own_experts(groups, routing)
        logits = logits.masked_fill(~allowed, -torch.inf)
    null_scores = None
    if null_logits is not None:
        both = _scores(torch.cat((logits, null_logits), -1), config)
        scores, null_scores = both.split((logits.shape[-1], null_logits.shape[-1]), -1)
    else:
        scores = _scores(logits, config)
    ranked = scores.detach() + bias
    if routing.expert_mask is not None:
        assert routing.sample is not None
        drawn = routing.expert_mask[:, layer].index_select(0, routing.sample)
        allowed = drawn if allowed is None else allowed & drawn
    if allowed is not None:
        ranked = ranked.masked_fill(~allowed, -torch.inf)
    expert = ranked.topk(top_k, -1).indices
    valid = needed = prices = whole = None
    if limit is not None:
        usable = scores if allowed is None else scores.masked_fill(~allowed, 0)
        limit = limits_of(limit, routing.group)
        prices, needed, whole = _allocate(usable, null_scores, limit, estimate, config, slots)
        valid = _first(needed, top_k)
    if routing.top_k is not None:
        assert routing.sample is not None
        fewer = _first(routing.top_k[:, layer].index_select(0, routing.sample), top_k)
        valid = fewer if valid is None else valid & fewer
    if groups is not None and int(groups.sum(-1).min()) < top_k:
        assert allowed is not None
        enough = allowed.gather(-1, expert)
        valid = enough if valid is None else valid & enough
    if routing.round_robin:
        expert = _in_turn(expert, allowed, groups is not None, logits.shape[-1], routing, layer)
    weight = scores.gather(-1, expert)
    if valid is not None:
        weight = weight * valid
    whole = weight.sum(-1, keepdim=True) if whole is None else whole
    weight = weight / whole.clamp(min=1e-12)
    return Decision(expert, weight, valid, logits, scores, needed, prices, null_scores)


def _scores(logits: Tensor, config: RouterConfig) -> Tensor:
    return torch.softmax(logits, -1) if config.score == "softmax" else torch.sigmoid(logits)


def _first(count_T: Tensor, slots: int) -> Tensor:
    """bool ``[T, slots]``: the first so many of each row."""
    return torch.arange(slots, device=count_T.device) < count_T[:, None]


def _own_experts(groups: Tensor, routing: Routing) -> Tensor:
    """bool ``[T, E]``: the experts of each token's kind."""
    if routing.group is None:
        raise ValueError(
            "experts isolated by kind of position need Routing.group, the kind of each token; "
            "a batch of packed rows has it as batch.group"
        )
    kinds = routing.group.long()
    empty = (~groups.any(-1)).nonzero().flatten()
    if len(empty) and bool(torch.isin(kinds, empty).any()):
        raise ValueError(
            f"the sub-network keeps no expert for kinds of position {empty.tolist()}; keep some of each kind"
        )
    return groups.index_select(0, kinds)


def _allocate(
    usable: Tensor,
    null_scores: Tensor | None,
    limit: Tensor,
    estimate: Tensor | None,
    config: RouterConfig,
    slots: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prices ``[T, slots]``, slots each token opens, and what its weights are shares of, ``[T, 1]``.

    Prices come from the scores as they are: the selection bias is there to even out the load, and with it a
    token of a crowded expert would look undecided. A dynamic number of experts competes with those not
    chosen as well, the nulls included, or a single chosen one would have weight 1 whatever its score and
    teach the router nothing.
    """
    least = config.allocation.least
    rebate = 0.0 if estimate is None else config.allocation.complexity_weight * estimate.detach()[:, None]
    experts = usable.shape[-1]
    slots = experts if slots is None else min(slots, experts)
    if null_scores is None:
        total = usable.sum(-1, keepdim=True)
        with torch.no_grad():
            prices = threshold_prices(usable.topk(slots, -1).values, total) - rebate
            return prices, open_slots(prices, limit, least), total
    nulls = null_scores.shape[-1]
    best = usable.topk(min(least + nulls, experts), -1).values
    with torch.no_grad():
        prices = null_prices(best, null_scores, least) - rebate
        winners = open_slots(prices, limit, least)
    won = (best * _first(winners, best.shape[-1])).sum(-1, keepdim=True)
    lost = null_scores.sort(-1, descending=True).values * _first(least + nulls - winners, nulls)
    return prices[:, :slots], winners.clamp(max=slots), won + lost.sum(-1, keepdim=True)


def _in_turn(
    expert: Tensor, allowed: Tensor | None, isolated: bool, experts: int, routing: Routing, layer: int
) -> Tensor:
    """The experts of ``routing.round_robin`` of the tokens replaced by the next allowed ones in turn."""
    tokens, slots = expert.shape
    device = expert.device
    if isolated:
        assert routing.group is not None
        kinds = F.one_hot(routing.group.long())
        number = (kinds.cumsum(0) * kinds).sum(-1) - 1
    else:
        number = torch.arange(tokens, device=device)
    turn = number[:, None] * slots + torch.arange(slots, device=device) + layer + routing.turn
    if allowed is None:
        chosen = turn % experts
    else:
        # Allowed experts first, in ascending order.
        order = (~allowed).to(torch.int8).argsort(dim=-1, stable=True)
        chosen = order.gather(-1, turn % allowed.sum(-1, keepdim=True).clamp(min=1))
    # The golden ratio spreads the chosen tokens evenly, whatever their share.
    spread = (number.double() * 0.6180339887498949) % 1.0
    return torch.where((spread < routing.round_robin)[:, None], chosen, expert)


def account(
    decision: Decision, config: RouterConfig, routing: Routing, layer: int, groups: Tensor | None = None
) -> None:
    """Note choices, load and prices in ``routing``, and add the layer's auxiliary losses."""
    expert, valid, scores = decision.expert, decision.valid, decision.scores
    slots = expert if valid is None else expert.masked_fill(~valid, -1)
    if routing.keep_choices:
        active = None if routing.experts is None else routing.experts[layer]
        kept = slots if active is None else torch.where(slots >= 0, active[slots.clamp(min=0)], -1)
        routing.choices[layer] = kept
    if routing.counted is None:
        return
    counted = routing.counted
    if routing.expert_mask is not None:
        assert routing.sample is not None
        # Masked-out experts must not look idle to the balance: only full-width tokens count.
        counted = counted & routing.expert_mask[:, layer].all(-1).index_select(0, routing.sample)
    routing.load[layer] = _load(slots, counted, scores.shape[-1])
    if decision.needed is not None and decision.prices is not None:
        needed = decision.needed[counted]
        routing.opened[layer] = torch.stack((needed.sum(), counted.sum())).double()
        group = None if routing.group is None else routing.group[counted]
        routing.prices[layer] = count_prices(decision.prices[counted], config.allocation, group)
    if config.auxiliary_weight and bool(counted.any()):
        routing.auxiliary.append(
            config.auxiliary_weight * _imbalance(decision, slots, counted, groups, routing)
        )
    if config.z_weight:
        routing.auxiliary.append(
            config.z_weight * torch.logsumexp(decision.logits, -1)[routing.counted].square().mean()
        )


def _load(slots_Tk: Tensor, counted_T: Tensor, experts: int) -> Tensor:
    """int64 ``[E]``: how many slots of the counted tokens chose each expert."""
    if slots_Tk.device.type == "cpu":
        chosen = slots_Tk[counted_T].flatten()
        return torch.bincount(chosen[chosen >= 0], minlength=experts)
    # The same where the sizes of results would have to be waited for: what is off is counted first.
    number = slots_Tk.masked_fill(~counted_T[:, None], -1).flatten() + 1
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=number.device)
    return counts.index_add_(0, number, torch.ones_like(number))[1:]


def _imbalance(
    decision: Decision, slots: Tensor, counted: Tensor, groups: Tensor | None, routing: Routing
) -> Tensor:
    """Switch's balance loss, E sum_i f_i P_i: 1 where load and probability are even.

    In an isolated pool it is the mean over the kinds of position of that within their own experts. Null
    experts need not balance among themselves: each counts with the mean of their loads (AdaMoE).
    """
    scores = decision.scores
    if decision.null_scores is not None:
        scores = torch.cat((scores, decision.null_scores), -1)
    probability = scores / scores.sum(-1, keepdim=True)
    if groups is None:
        return _uneven(slots[counted], probability[counted].mean(0), decision, None)
    assert routing.group is not None
    total = scores.new_zeros(())
    for number, own in enumerate(groups):
        here = counted & (routing.group == number)
        if bool(here.any()):
            share = here.sum() / counted.sum()
            total = total + share * _uneven(slots[here], probability[here].mean(0), decision, own)
    return total


def _uneven(slots: Tensor, probability_E: Tensor, decision: Decision, own: Tensor | None) -> Tensor:
    experts = decision.scores.shape[-1]
    load = torch.bincount(slots[slots >= 0], minlength=experts)
    if own is not None:
        load = load[own]
        probability_E = torch.cat((probability_E[:experts][own], probability_E[experts:]))
    if decision.null_scores is not None:
        nulls = decision.null_scores.shape[-1]
        unused = (slots < 0).sum() / nulls
        load = torch.cat((load.float(), unused.expand(nulls).float()))
    share = load / load.sum().clamp(min=1)
    return len(share) * (share * probability_E).sum()


def orthogonality(router_Ed: Tensor) -> Tensor:
    """Mean over expert pairs of the squared cosine between router rows (ERNIE 4.5): 0 where all differ."""
    rows = F.normalize(router_Ed.float(), dim=-1)
    return (rows @ rows.T - torch.eye(len(rows), device=rows.device)).square().mean()


def bias_step(load_E: Tensor, groups: Sequence[Tensor] | None = None) -> Tensor:
    """float32 ``[E]``: sign of each expert's deficit in load, against the mean of those it competes with."""
    load = load_E.float()
    if groups is None:
        return torch.sign(load.mean() - load)
    step = torch.zeros_like(load)
    for own in groups:
        if bool(own.any()):
            step[own] = torch.sign(load[own].mean() - load[own])
    return step


def round_robin_share(step: int, steps: int) -> float:
    """Share of tokens dispatched in turn at a step: all during the first ``steps``, then falling to none."""
    return min(max(2 - step / steps, 0.0), 1.0) if steps else 0.0
