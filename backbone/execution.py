"""Where a model runs and how: its device, the precision of float32 products, what is compiled.

A run's results on a CPU depend on none of this: there TF32 is no option, and without ``compile`` the same
operators run as ever. Random draws are made on the host whatever the device, so a run on a GPU draws what one
on a CPU draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ernie5.protocol.errors import InvalidInputError

_DEVICE = "auto|cpu|cuda(:[0-9]+)?"
# Gradients on or off, inference mode, one row or many: what a region may be compiled for, and room to spare.
_VARIANTS = 16


class Execution(BaseModel):
    """How a model is run; no part of what it is, so no checkpoint remembers it.

    ``device``: ``auto`` (the first CUDA device where there is one, else the CPU), ``cpu``, ``cuda`` or
    ``cuda:1``. ``tf32``: on a GPU, float32 matrix products of the whole process with 10-bit mantissas on
    tensor cores. ``compile``: the dense parts of the layers and the losses by ``torch.compile``, see
    :mod:`ernie5.backbone.model.regions`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = "auto"
    tf32: bool = True
    compile: bool = False


CPU = Execution(device="cpu")


def choose_device(name: str) -> torch.device:
    """The device called ``name``, see :class:`Execution`; always with its number where it is a GPU.

    Raises:
        InvalidInputError: an unknown name, or a device that isn't there.
    """
    if re.fullmatch(_DEVICE, name) is None:
        raise InvalidInputError(f"unknown device {name!r}; known: auto, cpu, cuda, cuda:0, …", param="device")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not there):
        return torch.device("cpu")
    number = int(name.partition(":")[2] or 0)
    if number >= there:
        raise InvalidInputError(
            f"device {name}: PyTorch {torch.__version__} finds {there} CUDA devices here; "
            f"take {f'cuda:0 to cuda:{there - 1}' if there else 'cpu, or install PyTorch for CUDA'}",
            param="device",
        )
    return torch.device("cuda", number)


def set_tf32(on: bool) -> None:
    """Float32 products of this process on NVIDIA GPUs in TF32 or exactly; the CPU's stay as they are.

    ``torch.set_float32_matmul_precision`` would change the CPU's too, and the kernels read this switch.
    """
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def moved(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
    """``tensor`` on ``device``; itself if it lies there.

    ``non_blocking`` goes from the host to a GPU by way of pinned memory, and the host does not wait.
    """
    if tensor.device == device:
        return tensor
    if non_blocking and device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Copies on the CPU, after one wait for all of them; tensors of the CPU are returned as they are."""
    waiting = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    copies = [tensor.to("cpu", non_blocking=bool(waiting)) for tensor in tensors]
    for device in waiting:
        torch.cuda.current_stream(device).synchronize()
    return copies


def numbers(tensors: list[Tensor]) -> list[float]:
    """Scalars of one device as Python's numbers, copied together."""
    if not tensors:
        return []
    if tensors[0].device.type == "cpu":
        return [float(tensor) for tensor in tensors]
    found: list[float] = torch.stack([tensor.double() for tensor in tensors]).cpu().tolist()
    return found


def wait_for(device: torch.device) -> None:
    """Wait until all that was launched on a GPU is done; on a CPU it is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compiled(
    function: Callable[..., Any], rows: tuple[int, ...], *, backend: str | Callable[..., Any] = "inductor"
) -> Callable[..., Any]:
    """``function`` by ``torch.compile``, once for all numbers of rows.

    Positional arguments ``rows`` are tensors whose first dimension is a number of rows that they share;
    everything else about the arguments stays as it was in the first call. A single row is compiled apart, as
    the compiler treats size 1 in a way of its own, and no rows at all run as they are. The entries belong to
    this call of :func:`compiled`, so models of several shapes in one process don't use up one another's.

    Raises:
        Exception: of the compiler, at the first call, where the function can't be one graph.
    """
    # Typed stubs of torch.compile lack these two.
    entries: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": _VARIANTS}
    # Nothing is dynamic but what is marked below.
    fast = torch.compile(function, fullgraph=True, dynamic=False, backend=backend, **entries)

    def call(*arguments: Any) -> Any:
        if not len(arguments[rows[0]]):
            return function(*arguments)
        for index in rows:
            torch._dynamo.maybe_mark_dynamic(arguments[index], 0)
        return fast(*arguments)

    return call
