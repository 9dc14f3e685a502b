"""How many of its top_k slots a token opens, and the controller that holds the mean to a budget.

Slot j of a token has a price, ascending in j, and opens where the price is below a limit that all tokens
of a layer share that are of one kind of position (all of them, with ``by_kind`` off); the first ``least``
slots always open. Two ways to price:

* threshold: minus the log of the share of the scores that the slots before it leave over. "Price below the
  limit" then reads: the fewest experts whose scores reach a threshold (arXiv 2403.07652), 1 - exp(-limit).
* null: by how many nats of score the null expert that would take the slot beats the real one (AdaMoE, arXiv
  2406.13233); the limit is minus the bias of the null experts.

A token that its layer guesses to be hard finds all slots cheaper.

The mean number of open slots is ``least`` plus the number of prices below the limit per token, so the limit
that meets a budget is a quantile of the prices. The controller goes a part of the way there each step,
which is DTop-p's feedback (arXiv 2512.13996) with the step size that the prices themselves tell.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ernie5.backbone.config import AllocationConfig
from ernie5.backbone.rows import GROUPS

BINS = 8192
PRICES = (-16.0, 16.0)  # nats; those beyond count at the ends
_FLOOR = 1e-7


def limit_count(allocation: AllocationConfig) -> int:
    """G, limits of a layer: one for each kind of position, or one for all; none of a fixed allocation."""
    if allocation.policy == "fixed":
        return 0
    return len(GROUPS) if allocation.by_kind else 1


def initial_limits(allocation: AllocationConfig) -> Tensor:
    """float32 ``[G]``: limits before the first step, a threshold of one half, null experts without bias."""
    return torch.full((limit_count(allocation),), math.log(2) if allocation.policy == "threshold" else 0.0)


def limits_of(limit_G: Tensor, group_T: Tensor | None) -> Tensor:
    """The limit of each token, ``[T, 1]``, or the only one, ``[1]``.

    Raises:
        ValueError: limits by kind of position, and the tokens' kinds are not told.
    """
    if len(limit_G) == 1:
        return limit_G
    if group_T is None:
        raise ValueError(
            "a budget held by kind of position needs Routing.group, the kind of each token; a batch of "
            "packed rows has it as batch.group"
        )
    return limit_G.index_select(0, group_T.long())[:, None]


def threshold_prices(score_Tk: Tensor, total_T1: Tensor) -> Tensor:
    """``[T, k]``: minus the log of the share of the allowed experts' scores that earlier slots leave over.

    The log keeps apart the shares of a router that is nearly sure.

    Args:
        score_Tk: the best scores, best first.
        total_T1: sum of the scores of all experts a token may use.
    """
    held = score_Tk.cumsum(-1) - score_Tk
    return -torch.log(((total_T1 - held) / total_T1.clamp(min=1e-12)).clamp(min=_FLOOR))


def null_prices(score_Tk: Tensor, null_Tn: Tensor, least: int) -> Tensor:
    """``[T, k]``: log score of the null expert that competes for each slot minus that of the real one.

    Real and null experts compete for ``least`` + n places, which n nulls can't fill alone. The j-th real
    expert (from 0) gets one where it beats the (least + n - j)-th best null expert.

    Args:
        score_Tk: scores of the real experts, best first.
        null_Tn: scores of the null experts, without their bias, in any order.
    """
    count = score_Tk.shape[-1]
    # Worst null first: the first slots after the certain ones are the easiest to win.
    worst_first = null_Tn.sort(-1).values
    certain = torch.zeros_like(score_Tk[:, :least])
    rival = torch.cat((certain, worst_first[:, : max(count - least, 0)]), -1)
    return (rival[:, :count].clamp(min=_FLOOR) / score_Tk.clamp(min=_FLOOR)).log()


def open_slots(price_Tk: Tensor, limit: Tensor, least: int) -> Tensor:
    """int64 ``[T]``: slots below the limit (see :func:`limits_of`) open, ``least`` whatever they cost."""
    opened = price_Tk < limit
    opened[:, :least] = True
    # Prices ascend but for rounding; a slot opens only after those before it.
    return opened.long().cumprod(-1).sum(-1)


def count_prices(price_Tk: Tensor, allocation: AllocationConfig, group_T: Tensor | None = None) -> Tensor:
    """int64 ``[G, BINS]``: histogram of the prices that each limit decides about; rows and ranks add up."""
    low, high = PRICES
    limits = limit_count(allocation)
    bins = ((price_Tk[:, allocation.least :] - low) * (BINS / (high - low))).floor()
    bins = bins.clamp(0, BINS - 1).long()
    if limits > 1:
        assert group_T is not None
        bins = bins + BINS * group_T.long()[:, None]
    return torch.bincount(bins.flatten(), minlength=limits * BINS).view(limits, BINS)


def fitting_limit(prices: Tensor, allocation: AllocationConfig, top_k: int) -> float | None:
    """The limit at which these prices (one histogram) open ``budget`` slots in the mean; None without any."""
    total = int(prices.sum())
    if total == 0 or top_k == allocation.least:
        return None
    low, high = PRICES
    wanted = (allocation.budget - allocation.least) / (top_k - allocation.least) * total
    reached = prices.cumsum(0).double()
    index = int(torch.searchsorted(reached, torch.tensor(wanted, dtype=torch.float64)).clamp(max=BINS - 1))
    before = float(reached[index]) - float(prices[index])
    within = (wanted - before) / max(float(prices[index]), 1.0)
    return low + (index + min(max(within, 0.0), 1.0)) * (high - low) / BINS
