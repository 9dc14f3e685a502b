"""Forward-mode differentiation meets operators that have none."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad


def refuse_tangents(operator: str, instead: str, *tensors: Tensor | None) -> None:
    """Raise where a tensor carries a tangent that ``operator`` would drop without a word.

    An operator of ``torch.library`` has a reverse mode alone, and torch takes the missing tangent of its
    result for 0. ``instead`` says what does have a forward mode.

    Raises:
        NotImplementedError: a tensor carries a tangent, of ``torch.func.jvp`` or ``forward_ad``.
    """
    if forward_ad._current_level < 0:  # the usual case: nobody differentiates forwards
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{operator} has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad); {instead}"
            )
