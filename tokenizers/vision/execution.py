"""How the vision network runs: on which device, in which dtype, compiled or not, in batches of one size.

Each of these can change the last bits of a result, and with them a code, so all are part of the tokenizer's
hash (:attr:`Execution.identity`). The plain path, float32 and not compiled, is the default everywhere;
bfloat16 and ``torch.compile`` are for GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GPU_BATCH = 16
# Every shape is compiled by itself; a service sees a dozen grids, each encoded and decoded.
_COMPILED_SHAPES = 128

Function = Callable[[Tensor], Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Execution:
    """A way to run the network.

    Args:
        device: CUDA where present if None.
        dtype: ``float32`` or ``bfloat16``, of weights and activations; results are float32 all the same.
        compile: let ``torch.compile`` compile each function for each shape, when it first comes.
        backend: of ``torch.compile``; another one than the default is for tests.

    Raises:
        ValueError: another dtype, or a GPU that is not there.
    """

    device: torch.device | str | None = None
    dtype: str = "float32"
    compile: bool = False
    backend: str = "inductor"
    _compiled: dict[Any, Function] = field(default_factory=dict, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(_DTYPES)}")
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device {str(device)!r} is asked for and no CUDA device is here; take device 'cpu', or None"
            )
        object.__setattr__(self, "device", device)

    @property
    def kind(self) -> str:
        """The kind of device: ``cpu`` or ``cuda``."""
        return torch.device(self.device or "cpu").type

    @property
    def batch(self) -> int:
        """Items of every batch: one on a CPU, 16 on a GPU, filled up with zeros."""
        return _GPU_BATCH if self.kind == "cuda" else 1

    @property
    def identity(self) -> str:
        """What of it changes results, for the tokenizer's hash: ``cuda/bfloat16/compiled``."""
        return f"{self.kind}/{self.dtype}" + ("/compiled" if self.compile else "")

    def place(self, model: nn.Module) -> None:
        """Move a model to the device and dtype, ready for inference."""
        model.to(device=self.device, dtype=_DTYPES[self.dtype]).eval().requires_grad_(False)

    def run(self, function: Function, part: Tensor) -> tuple[Tensor, ...]:
        """``function`` of float32 ``part`` ``[n, …]``, n up to :attr:`batch`; results float32 on the CPU.

        Give a method of the model, not a function made anew: what is compiled is kept by it.
        """
        count = len(part)
        if count < self.batch:
            part = torch.cat([part, part.new_zeros(self.batch - count, *part.shape[1:])])
        with (
            torch.inference_mode(),
            torch.backends.cudnn.flags(benchmark=False, deterministic=True, allow_tf32=False),
        ):
            inputs = part.contiguous().to(device=self.device, dtype=_DTYPES[self.dtype])
            outputs = self._compiled_run(function, inputs) if self.compile else function(inputs)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        return tuple(output[:count].float().cpu() for output in outputs)

    def _compiled_run(self, function: Function, inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        # HTTP and the work stream compute in threads of their own; the compiler's settings are everybody's.
        with (
            self._lock,
            # Beyond the limit torch would go on uncompiled, silently and with other bits; it shall say so.
            torch._dynamo.config.patch(recompile_limit=_COMPILED_SHAPES, fail_on_recompile_limit_hit=True),
        ):
            compiled = self._compiled.get(function)
            if compiled is None:
                compiled = torch.compile(function, dynamic=False, fullgraph=True, backend=self.backend)
                self._compiled[function] = compiled
            return compiled(inputs)
