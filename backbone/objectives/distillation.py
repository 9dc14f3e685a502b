"""Distillation of the full model into its sub-models, in the step that trains them.

A row that runs with fewer layers learns from the next tokens and from what the whole model says about them
(in-place distillation of slimmable networks, Yu and Huang, arXiv 1903.05134, section 3.3). The teacher is the
same network at the same step without gradients: nothing is kept between steps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ernie5.backbone.model.router import Routing
from ernie5.backbone.model.transformer import Backbone, Outputs
from ernie5.backbone.rows import RowBatch


def text_distillation(model: Backbone, batch: RowBatch, outputs: Outputs) -> Tensor:
    """Weighted sum over text targets of KL(full model || ``outputs``) minus their cross-entropy, in nats.

    Added ``share`` times to the sum of the cross-entropies it leaves ``1 - share`` of those. Costs a forward
    pass of the whole model over these rows.
    """
    with torch.no_grad():
        teacher = model(batch, routing=Routing(group=batch.group.flatten())).text.log_softmax(-1)
    student = outputs.text.log_softmax(-1)
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    entropy = F.nll_loss(student, batch.text_target, reduction="none")
    return ((divergence - entropy) * batch.text_weight).sum()
