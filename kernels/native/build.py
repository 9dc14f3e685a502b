"""Compiles and loads the C++ kernels.

There is one source and one library a variant: the instruction sets that a CPU may have. The variant is
chosen at run time; ``ERNIE_MULTI_NATIVE`` names one (or ``off``). A library that lies in ``prebuilt/`` (put
there when a wheel is made) is used as it is; otherwise the system's compiler (``CXX``, which may carry
arguments, or the first of g++, clang++, c++) makes it in seconds. It is kept in ``ERNIE_MULTI_CACHE``
(default ``~/.cache/ernie-multi``) under a name made from sources, flags and compiler: processes and versions
never meet another's library.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent
_SOURCES = ("attention.cpp", "experts.cpp")
_LIBRARY = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
# Fused multiply-adds are wanted; other liberties with floating point would break the exponential.
_COMMON = (*_LIBRARY, "-ffp-contract=fast", "-fno-math-errno")
# GCC would make a second copy of the inner loop for strides of one and spoil the general one: half the speed.
_GCC = ("-fno-version-loops-for-strides",)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
# Best first: name, flags of the compiler, flags that /proc/cpuinfo must show.
VARIANTS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "avx512_bf16": (
        (*_AVX512, "-mavx512bf16"),
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx2", "fma"}),
    ),
    "avx512": (_AVX512, frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma"})),
    "avx2": (_AVX2, frozenset({"avx2", "fma"})),
    "portable": ((), frozenset()),
}


Compiler = tuple[str, ...]  # a program and arguments of its own


class NativeUnavailableError(RuntimeError):
    """The kernels cannot be had here; the text says why and what would help."""


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU by the names of ``/proc/cpuinfo``; empty where that does not exist."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def best_variant(flags: frozenset[str] | None = None) -> str:
    """The first variant that runs on a CPU with ``flags`` (this one's by default)."""
    have = cpu_flags() if flags is None else flags
    return next(name for name, (_, needed) in VARIANTS.items() if needed <= have)


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels for this CPU, loaded once a process.

    Raises:
        NativeUnavailableError: switched off, no compiler, or the compiler failed.
    """
    wanted = os.environ.get("ERNIE_MULTI_NATIVE") or "auto"
    if wanted == "off":
        raise NativeUnavailableError("the native kernels are switched off by ERNIE_MULTI_NATIVE=off")
    if wanted != "auto" and wanted not in VARIANTS:
        raise ValueError(f"ERNIE_MULTI_NATIVE={wanted!r} is unknown; known: auto, off, {', '.join(VARIANTS)}")
    missing = VARIANTS[wanted][1] - cpu_flags() if wanted != "auto" else frozenset()
    if missing:
        raise ValueError(
            f"ERNIE_MULTI_NATIVE={wanted} needs {', '.join(sorted(missing))}, which this CPU lacks; it can "
            f"run {best_variant()}"
        )
    variant = best_variant() if wanted == "auto" else wanted
    path = built(variant)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if path.parent.name == "prebuilt":
            raise NativeUnavailableError(f"{path} can't be loaded: {error}") from error
        _log.warning("%s can't be loaded (%s); compiling it anew", path, error)
    try:
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(built(variant)))
    except OSError as error:
        raise NativeUnavailableError(f"{path} can't be loaded: {error}") from error


@functools.cache
def available(instead: str) -> bool:
    """Whether the kernels can be had; the log says once why not, after ``instead``: what happens without."""
    try:
        library()
    except NativeUnavailableError as error:
        _log.warning("%s: %s", instead, error)
        return False
    return True


def run(kernels: ctypes.CDLL, name: str, call: ctypes.Structure, size: str, *, known: int = 0) -> int:
    """Call ``name`` of the kernels; its failures come as exceptions, ``size`` says what found no memory.

    Returns:
        0, or the code ``known``, which is no failure.
    """
    status: int = getattr(kernels, name)(ctypes.byref(call))
    if status == 1:
        raise MemoryError(f"{name}: no memory for {size}")
    if status not in (0, known):
        raise RuntimeError(f"{name} failed with status {status}")
    return status


def built(variant: str) -> Path:
    """The library of one variant, made if need be."""
    prebuilt = _FOLDER / "prebuilt" / prebuilt_name(platform.machine(), variant)
    if prebuilt.exists():
        return prebuilt
    compiler = find_compiler()
    flags = compile_flags(compiler, variant)
    target = _cache_folder() / f"kernels-{variant}-{_digest(compiler, flags)}.so"
    if not target.exists():
        # One process compiles, the others wait for it; the name appears only when the file is whole.
        try:
            with open(target.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    _log.info("compiling the native kernels (%s) with %s", variant, shlex.join(compiler))
                    compile_to(target, compiler, flags)
        except OSError as error:
            raise NativeUnavailableError(
                f"compiled kernels can't be kept in {target.parent} ({error}); set ERNIE_MULTI_CACHE"
            ) from error
    return target


def prebuilt_name(machine: str, variant: str) -> str:
    """File name of a library that comes with a wheel."""
    return f"kernels-{machine}-{variant}.so"


def compile_flags(compiler: Compiler, variant: str) -> tuple[str, ...]:
    """All flags but the files'."""
    gcc = () if "clang" in _version(compiler) else _GCC
    return (*_COMMON, *gcc, *VARIANTS[variant][0])


def compile_to(target: Path, compiler: Compiler, flags: tuple[str, ...]) -> None:
    """Compile all sources into one shared library at ``target``, atomically."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    command = [*compiler, *flags, *(str(_FOLDER / source) for source in _SOURCES), "-o", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise NativeUnavailableError(
                f"{shlex.join(compiler)} could not compile the native kernels (exit status "
                f"{done.returncode}): {done.stderr.strip()[-2000:]}"
            )
        if Path(name).stat().st_size == 0:
            raise NativeUnavailableError(f"{shlex.join(compiler)} said that it was done, but made nothing")
        os.chmod(name, 0o755)
        os.replace(name, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{shlex.join(compiler)} could not be run: {error}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def find_compiler() -> Compiler:
    """The C++ compiler and arguments of its own: what ``CXX`` says, split as a shell would (``ccache g++``),
    or the first of g++, clang++ and c++ that is installed.

    Raises:
        NativeUnavailableError: none is, or ``CXX`` can't be split. One that names no program is logged.
    """
    named = os.environ.get("CXX", "")
    if named.strip():
        try:
            program, *arguments = shlex.split(named)
        except ValueError as error:
            raise NativeUnavailableError(f"CXX={named!r} can't be split into words: {error}") from error
        if found := shutil.which(program):
            return (found, *arguments)
        _log.warning("CXX=%r names %s, which is not installed; trying other compilers", named, program)
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return (found,)
    raise NativeUnavailableError("no C++ compiler was found; install g++ or name one in CXX")


def _digest(compiler: Compiler, flags: tuple[str, ...]) -> str:
    state = hashlib.sha256()
    for path in sorted(_FOLDER.glob("*.h")) + sorted(_FOLDER.glob("*.cpp")):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    state.update("\0".join((*compiler[1:], *flags, _version(compiler), platform.machine())).encode())
    return state.hexdigest()[:16]


@functools.cache
def _version(compiler: Compiler) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{shlex.join(compiler)} could not be run: {error}") from error


def _cache_folder() -> Path:
    """A folder only this user can write to: what lies in it is loaded as code."""
    named = os.environ.get("ERNIE_MULTI_CACHE")
    try:
        folder = (Path(named).expanduser() if named else Path.home() / ".cache" / "ernie-multi") / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
        if state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return folder
        reason = f"others may write to {folder}"
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        reason = str(error)
    raise NativeUnavailableError(f"no folder for compiled kernels ({reason}); set ERNIE_MULTI_CACHE")
