"""More bits a visual cell for a model that is there: the low-to-high switch of ERNIE 5.0, section 2.2.1.

The codes of a smaller bit width are the low bits of a larger one's (`tokenizers/vision/model.py`), so what a
model knows of its bits stays true. The new ones enter with weights of zero: at first the grown model gives
each old bit the odds that it had, and a new one even odds.
"""

from __future__ import annotations

import torch

from ernie5.backbone.model.transformer import Backbone

# Tensors that have one entry a bit, and along which axis.
_BY_BIT = {"embeddings.scale_value.weight": 1, "heads.bits.weight": 0, "heads.bits.bias": 0}


@torch.no_grad()
def grow_bits(model: Backbone, bits: int) -> Backbone:
    """A model for codes of ``bits`` bits with the weights of ``model``, in evaluation mode.

    Raises:
        ValueError: ``bits`` is not above what the model has, or above 32.
    """
    had = model.config.bits
    if not had < bits <= 32:
        raise ValueError(f"a model of {had} bits can grow to {had + 1} to 32, not to {bits}")
    grown = Backbone(model.config.model_copy(update={"bits": bits}))
    state = model.state_dict()
    for name, axis in _BY_BIT.items():
        shape = list(state[name].shape)
        shape[axis] = bits - had
        state[name] = torch.cat([state[name], state[name].new_zeros(shape)], axis)
    grown.load_state_dict(state)
    return grown.eval()
