"""A second device on a machine that has none: what lies on it computes as on the CPU, but can't be mixed.

Tensors of this device say that they are on ``meta`` and hold their data all the same. An operator that is
given them together with tensors of the CPU raises as on a GPU, and what a GPU would have to be waited for is
noted with the place that asked. Numbers are the CPU's, so results can be compared to the bit.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
# Copies between devices are what these are for; an empty tensor and its later content need not agree.
_MAY_MIX = ("aten::_to_copy", "aten::to.", "aten::copy_")
# Lazy conjugates and signs are resolved above the level where operators arrive here.
_AT_ONCE = {torch.ops.aten._conj.default: torch.conj_physical, torch.ops.aten._neg_view.default: torch.neg}
# Their results' sizes or values depend on the data.
_WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::bincount",
    "aten::unique",
    "aten::_unique",
    "aten::equal",
    "aten::is_nonzero",
)


class Pretended(torch.Tensor):
    """A tensor of the pretended device; its data are ``inner``."""

    inner: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        # A view of a tensor that is not of inference mode must not be of it either.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=DEVICE,
            )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, None)

    def tolist(self) -> Any:
        return self.cpu().tolist()


class PretendDevice(TorchDispatchMode):
    """While it is active, factories make tensors there, and ``waits`` counts by file and line."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.waits)

    def waits_in(self, *parts: str) -> dict[str, int]:
        """Those at places whose path has one of ``parts`` in it."""
        return {place: count for place, count in self.waits.items() if any(part in place for part in parts)}


def _run(func: Any, args: Any, kwargs: Any, waits: Counter[str] | None) -> Any:
    leaves = tree_leaves((args, kwargs))
    there = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    here = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Pretended)]
    name = func._schema.name + ("." + func._schema.overload_name if func._schema.overload_name else "")
    if there and not name.startswith(_MAY_MIX) and any(tensor.dim() for tensor in here):
        shapes = [tuple(tensor.shape) for tensor in here]
        raise RuntimeError(f"{name} mixes devices: tensors {shapes} are on the CPU, others are not")
    wanted = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    made = _AT_ONCE.get(func, func)(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    to_host = bool(there) and wanted is not None and wanted.type == "cpu"
    if waits is not None and there and (to_host or name.startswith(_WAITS) or _picks_by_mask(name, args)):
        waits[_asker()] += 1
    written = _written(func, args, kwargs)
    if written is not None:
        return written
    if to_host or (wanted is not None and wanted.type == "cpu") or (wanted is None and not there):
        return made
    if not there:  # from the host: memory of its own
        made = tree_map(lambda leaf: leaf.clone() if any(leaf is tensor for tensor in here) else leaf, made)
    return tree_map(
        lambda leaf: (
            Pretended(leaf) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Pretended) else leaf
        ),
        made,
    )


def _inner(leaf: Any) -> Any:
    if isinstance(leaf, Pretended):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == DEVICE.type else leaf


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The argument that an operator in place returns, if this is one."""
    if len(func._schema.returns) != 1:
        return None
    told = func._schema.returns[0].alias_info
    if told is None or not told.is_write:
        return None
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[position] if position < len(args) else kwargs[argument.name]
    return None


def _picks_by_mask(name: str, args: Any) -> bool:
    return name.startswith("aten::index.") and any(
        isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
    )


def _asker() -> str:
    """The innermost place outside torch and this file."""
    frame = sys._getframe(1)
    while frame is not None and (
        "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
