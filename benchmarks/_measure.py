"""What the benchmarks share: the clock, interleaved arms, the matrix product to compare with, peak memory.

Arms of a comparison take turns, round by round, and a ratio is the median of the rounds' ratios: a neighbour
that slows the machine for a while slows both sides of a round. With one thread the clock is the process's
CPU time, which a neighbour's load does not enter; with more it is wall time, as CPU time would add the
threads up.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
_SHORTEST_S = 0.03  # a faster arm is repeated inside its turn: the clocks tick in microseconds, caches settle


def machine(threads: int) -> dict[str, Any]:
    """The processor, what it can do, how busy it is, and the versions that matter."""
    model, flags = platform.processor(), ""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    model = value.strip()
                elif name.strip() == "flags":
                    flags = value
    except OSError:
        pass
    return {
        "cpu": model or platform.machine(),
        "isa": [name for name in _ISA if name in flags.split()],
        "cores": os.cpu_count(),
        "threads": threads,
        "clock": clock_name(threads),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version for name in ("transformers",) if (version := version_of(name))},
    }


def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def show_machine(facts: Mapping[str, Any]) -> None:
    """One line a fact group, for people."""
    print(
        f"{facts['cpu']}, {facts['cores']} cores, {'/'.join(facts['isa']) or 'no AVX2'}, "
        f"load {facts['load']}; {facts['threads']} threads, {facts['clock']} time"
    )
    names = ("python", "torch", "transformers")
    print(", ".join(f"{name} {facts[name]}" for name in names if name in facts), flush=True)


def clock_name(threads: int) -> str:
    """Which time a run with so many threads is measured in."""
    return "cpu" if threads == 1 else "wall"


def clock(threads: int) -> Callable[[], float]:
    """The clock itself, in seconds."""
    return time.process_time if threads == 1 else time.perf_counter


@dataclass
class Rounds:
    """Seconds of each arm, one entry a round; arms that were left out have a reason instead."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def median(self, arm: str) -> float | None:
        """Seconds of one call, or None for an arm that was left out."""
        return statistics.median(self.seconds[arm]) if arm in self.seconds else None

    def ratio(self, slow: str, fast: str) -> float | None:
        """Median over the rounds of ``slow``'s time over ``fast``'s: how many times faster ``fast`` is."""
        if slow not in self.seconds or fast not in self.seconds:
            return None
        return statistics.median(a / b for a, b in zip(self.seconds[slow], self.seconds[fast]))


def take_turns(
    arms: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    threads: int,
    bound_s: float = math.inf,
    warm_up: bool = True,
) -> Rounds:
    """Time ``arms`` in turn, after a round of warm-up unless calls are so long that it would not show.

    An arm that takes longer than ``bound_s`` in the first round is left out, with the reason, and so is one
    that can't run at all: nothing is extrapolated.
    """
    now = clock(threads)
    result = Rounds()
    for name, arm in arms.items():
        try:
            if warm_up:
                arm()  # may compile, page in, or build what the plan keeps
        except (NotImplementedError, RuntimeError, ValueError) as error:
            result.left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"  {name}: left out, {result.left_out[name]}", flush=True)
            continue
        result.seconds[name] = []
    for _ in range(rounds):
        for name, times in list(result.seconds.items()):
            started, calls = now(), 0
            while calls == 0 or now() - started < _SHORTEST_S:
                arms[name]()
                calls += 1
            times.append((now() - started) / calls)
            if times[-1] > bound_s:
                del result.seconds[name]
                result.left_out[name] = f"a call takes {times[-1]:.0f} s, above the bound of {bound_s:.0f} s"
                print(f"  {name}: left out, {result.left_out[name]}", flush=True)
    return result


@dataclass(frozen=True)
class Product:
    """The square matrix product that a rate is compared with."""

    dtype: torch.dtype
    size: int
    call: Callable[[], object]

    @property
    def flops(self) -> float:
        return 2.0 * self.size**3

    @property
    def name(self) -> str:
        return f"torch.mm {self.size}³ {str(self.dtype).removeprefix('torch.')}"


def product(dtype: torch.dtype, threads: int, bound_s: float = 2.0) -> Product:
    """``torch.mm`` of 2048 x 2048, or the largest smaller power of two that stays within ``bound_s``.

    Some CPUs have no bf16 product worth the name (0.3 GF/s); 2048³ would take a minute there.
    """
    now = clock(threads)
    size = 128
    while True:
        left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        call = partial(torch.mm, left, right)
        call()
        started = now()
        call()
        took = now() - started
        if size == 2048 or took * 8 > bound_s:
            return Product(dtype, size, call)
        size *= 2


def peak_mb(measured: Callable[..., _T], *arguments: Any, timeout_s: float = 600.0) -> _T | None:
    """What ``measured(*arguments)`` returns from a process of its own; None if that dies or takes too long.

    A process's memory never shrinks back for certain, so every measurement starts a new one.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        future = pool.submit(measured, *arguments)
        try:
            return future.result(timeout_s)
        except Exception as error:
            print(f"  {measured.__name__}: no figure, {type(error).__name__}: {error}", flush=True)
            for child in multiprocessing.active_children():
                child.kill()
            return None


def resident_peak_mb(work: Callable[[], object]) -> float:
    """MiB by which this process's resident memory rises during ``work``, at its highest.

    Call ``work`` once before, as code that runs for the first time is paged in. Linux only:
    ``/proc/self/clear_refs`` sets the high-water mark back. What the allocator keeps from earlier calls goes
    back to the system first, so that ``work`` does not find it for nothing.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library keeps what it keeps
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status_mb("VmRSS")
    kept = work()
    peak = _status_mb("VmHWM")
    del kept
    return max(peak - before, 0.0)


def whole_peak_mb() -> float:
    """MiB that this process has had resident at its highest, interpreter and libraries included."""
    return _status_mb("VmHWM")


def _status_mb(name: str) -> float:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {name}")


def rounded(value: Any, digits: int = 3) -> Any:
    """Figures of a nested result, rounded for reading; None and text stay."""
    if isinstance(value, float):
        return round(value, digits) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part, digits) for part in value]
    return value


def median_of(values: list[float | None]) -> float | None:
    """Median of those that were measured."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def show_table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Rows of figures, one line each; a dash where there is none."""

    def cell(value: Any) -> str:
        if value is None:
            return "–"
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    cells = [columns, *([cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    for line in cells:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)), flush=True)


def print_json(result: Mapping[str, Any]) -> None:
    """The last line of a benchmark."""
    print(json.dumps(rounded(result)), flush=True)
