"""Ahead-of-time compilation of the Triton kernels for a GPU that need not be there, and what ptxas says.

Triton's wheel carries ptxas, so a machine without a GPU can tell whether a kernel spills registers, how much
shared memory it takes and which instructions it came down to.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_ELEMENT_POINTERS = {
    *("query", "key", "value", "out", "lost"),
    *("grad_out", "grad_query", "grad_key", "grad_value"),
}
_FLOAT_POINTERS = {"lse", "delta", "lse_log2"}
_INT_POINTERS = {"bounds", "splits", "tiles"}
_FLOATS = {"softmax_scale", "scale_log2"}


@dataclass(frozen=True)
class CompileReport:
    """What one kernel became.

    Attributes:
        target: for example ``sm_90a``.
        registers: per thread.
        spill_bytes: stores and loads of registers spilled to local memory, per thread.
        shared_bytes: shared memory of one program.
        async_copies: ``cp.async`` and bulk copies in the PTX; 0 means that loads wait.
        matrix_instruction: ``wgmma``, ``mma.sync`` or ``none`` (plain multiply-adds).
    """

    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    async_copies: int
    matrix_instruction: str


def compile_kernel(
    kernel: Any,
    constants: Mapping[str, Any],
    *,
    capability: int,
    element: str = "bf16",
    warps: int = 4,
    stages: int = 3,
    types: Mapping[str, str] | None = None,
    aligned: Sequence[str] = (),
) -> CompileReport:
    """Compile a jitted kernel and assemble it with ptxas.

    Args:
        kernel: a ``triton.jit`` function (not made under ``TRITON_INTERPRET``).
        constants: values of its compile-time parameters.
        capability: 80 for sm_80, 90 for sm_90a.
        element: Triton's name of the tensors' type: ``bf16``, ``fp16`` or ``fp32``.
        types: Triton types of parameters whose names say none; ``*e`` stands for a pointer to ``element``.
        aligned: parameters that are multiples of 16, besides pointers, strides and padded sizes.

    Raises:
        RuntimeError: ptxas refuses the code.
    """
    names = kernel.arg_names
    given = {name: kind.replace("*e", f"*{element}") for name, kind in (types or {}).items()}
    signature = {name: given.get(name) or _type_of(name, element, constants) for name in names}
    # Tensors start at multiples of 16 bytes and strides are multiples of 16 elements, as in the model.
    even = [
        name
        for name in names
        if signature[name].startswith("*")
        or "stride" in name
        or name.startswith("padded_")
        or name in aligned
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(kernel, signature, constexprs=dict(constants), attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    text = compiled.asm["ptx"]
    target = re.search(r"\.target (sm_\w+)", text)
    assert target is not None
    said = _assemble(text, target.group(1))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.findall(r"Used (\d+) registers", said)
    matrix = next((name for name in ("tcgen05.mma", "wgmma.mma_async", "mma.sync") if name in text), "none")
    return CompileReport(
        target=target.group(1),
        registers=max(map(int, registers)),
        spill_bytes=max(int(stores) + int(loads) for stores, loads in spills),
        shared_bytes=compiled.metadata.shared,
        async_copies=len(re.findall(r"\bcp\.async\.(?:c[ag]\.shared|bulk\.tensor)", text)),
        matrix_instruction=matrix.removesuffix(".mma_async"),
    )


def _type_of(name: str, element: str, constants: Mapping[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in _ELEMENT_POINTERS:
        return f"*{element}"
    if name in _FLOAT_POINTERS:
        return "*fp32"
    if name in _INT_POINTERS:
        return "*i32"
    return "fp32" if name in _FLOATS else "i32"


def _assemble(ptx: str, target: str) -> str:
    """ptxas' report on one program."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [str(assembler), "-v", f"-arch={target}", str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True,
            text=True,
            timeout=300,
        )
    if done.returncode:
        raise RuntimeError(f"ptxas refuses the kernel for {target}: {done.stderr.strip()}")
    return done.stderr
