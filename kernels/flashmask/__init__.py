"""FlashMask: attention under a column-interval mask (Wang et al., arXiv 2410.01359), widened to K intervals.

A mask lists, for every key column, the disjoint intervals of query rows that may *not* see it. That takes
O(N) memory and lets whole tiles be skipped, where a dense mask takes O(N^2).
"""

from ernie5.kernels.flashmask.attention import flashmask_attention
from ernie5.kernels.flashmask.plan import MaskPlan

__all__ = ["MaskPlan", "flashmask_attention"]
