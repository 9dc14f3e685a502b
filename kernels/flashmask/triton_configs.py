"""Tile sizes of the Triton kernels by GPU, head dim and type.

Entries assemble within the GPU's shared memory and without spilled registers, but for the spills that
docs/kernels.md names; a test compiles them and fails for any other. The first of each list is the default, so
that a run does not depend on timings and repeats bit for bit;
:func:`ernie5.kernels.flashmask.triton_tuning.tune` measures the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TileConfig(NamedTuple):
    """Query rows and key columns of a tile, warps of a program, stages of its load pipeline.

    Reading a tile's number takes a stage as well as reading the tile: 2 to 4 stages keep one tile in flight
    ahead, 5 keep two.
    ``fold`` is for ``dkdv`` only; see ``_dkdv_tiles``. With more than ``most_intervals`` masked intervals a
    column it would spill.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    fold: bool = False
    most_intervals: int = 3


class ConfigKey(NamedTuple):
    """What a configuration depends on.

    Attributes:
        kernel: ``forward``, ``dkdv``, ``dq`` or ``delta``.
        family: ``sm_80`` (A100), ``sm_86`` (GPUs with 100 KiB of shared memory), ``sm_90`` (Hopper and later
            with as much shared memory) or ``interpreter``.
        head_dim: padded to a power of two.
        element_bytes: 2 or 4.
        intervals: masked intervals a column, 1 to 3.
    """

    kernel: str
    family: str
    head_dim: int
    element_bytes: int
    intervals: int


_T = TileConfig
_INTERPRETER = {"forward": _T(32, 32, 4, 1), "dkdv": _T(32, 32, 4, 1), "dq": _T(32, 32, 4, 1)}
_DELTA = _T(64, 64, 4, 1)
# (kernel, family): padded head dim -> configurations for 16-bit elements.
_HALF: dict[tuple[str, str], dict[int, list[TileConfig]]] = {
    ("forward", "sm_80"): {
        64: [_T(128, 64, 8, 5), _T(128, 64, 8, 3), _T(64, 64, 4, 3)],
        128: [_T(128, 64, 8, 5), _T(128, 64, 8, 3)],
        256: [_T(64, 64, 8, 2)],
    },
    ("forward", "sm_86"): {
        64: [_T(128, 64, 8, 5), _T(64, 64, 4, 3)],
        128: [_T(128, 64, 8, 3)],
        256: [_T(64, 32, 8, 2)],
    },
    ("forward", "sm_90"): {
        64: [_T(128, 64, 8, 5), _T(128, 64, 8, 3), _T(128, 64, 4, 3)],
        128: [_T(128, 64, 8, 5), _T(128, 64, 8, 3)],
        256: [_T(64, 64, 8, 2)],
    },
    ("dkdv", "sm_80"): {
        64: [_T(32, 128, 8, 2)],
        128: [_T(64, 64, 8, 2, most_intervals=2), _T(32, 64, 8, 2)],
        256: [_T(64, 32, 8, 2, most_intervals=2), _T(32, 32, 8, 2)],
    },
    ("dkdv", "sm_86"): {
        64: [_T(32, 128, 8, 2)],
        128: [_T(32, 64, 8, 2)],
        256: [_T(32, 32, 8, 2)],
    },
    ("dkdv", "sm_90"): {
        64: [_T(64, 128, 8, 3), _T(64, 128, 8, 2), _T(64, 64, 8, 2)],
        128: [_T(64, 128, 8, 2, True)],
        256: [_T(64, 32, 8, 2), _T(32, 32, 8, 2)],
    },
    ("dq", "sm_80"): {
        64: [_T(128, 64, 8, 3), _T(64, 64, 4, 3)],
        128: [_T(128, 32, 8, 3), _T(64, 32, 4, 3)],
        256: [_T(64, 64, 8, 2), _T(64, 32, 8, 2)],
    },
    ("dq", "sm_86"): {
        64: [_T(128, 32, 8, 3), _T(64, 32, 4, 3)],
        128: [_T(128, 32, 8, 3), _T(64, 32, 4, 3)],
        256: [_T(64, 32, 8, 2)],
    },
    ("dq", "sm_90"): {
        64: [_T(128, 64, 8, 5), _T(128, 64, 8, 3), _T(128, 128, 8, 3)],
        128: [_T(128, 64, 8, 3), _T(64, 64, 4, 3)],
        256: [_T(64, 32, 8, 2), _T(128, 32, 8, 2, most_intervals=2)],
    },
}
# float32 products run on plain multiply-adds unless TF32 is allowed: small tiles, all families alike.
_SINGLE: dict[str, dict[int, list[TileConfig]]] = {
    "forward": {64: [_T(32, 32, 4, 2)], 128: [_T(32, 16, 8, 1)], 256: [_T(16, 16, 8, 1)]},
    "dkdv": {64: [_T(32, 32, 4, 2)], 128: [_T(16, 32, 8, 1)], 256: [_T(16, 16, 8, 1)]},
    "dq": {64: [_T(32, 32, 4, 2)], 128: [_T(32, 32, 8, 2)], 256: [_T(16, 16, 4, 1)]},
}
_chosen: dict[ConfigKey, TileConfig] = {}


def config_key(kernel: str, query: torch.Tensor, intervals: int) -> ConfigKey:
    head_dim = padded_head_dim(query.shape[-1])
    return ConfigKey(kernel, gpu_family(query.device), head_dim, query.element_size(), intervals)


def padded_head_dim(width: int) -> int:
    """The power of two, at least 16, that a tile holds a head dim in."""
    return max(16, 1 << (width - 1).bit_length())


def constants(
    kernel: str, width: int, config: TileConfig, *, intervals: int, precision: str, keep: bool = False
) -> dict[str, int | str | bool]:
    """Compile-time parameters of an attention kernel.

    Args:
        kernel: ``forward``, ``dkdv`` or ``dq``.
        width: head dim.
        intervals: masked intervals a column.
        precision: of float32 products: ``ieee`` or ``tf32``.
        keep: for ``forward`` only: also store what rounding takes from the output.
    """
    shared: dict[str, int | str | bool] = {
        "DIM": width,
        "BLOCK_D": padded_head_dim(width),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "INTERVALS": intervals,
        "PRECISION": precision,
    }
    own: dict[str, dict[str, int | str | bool]] = {"forward": {"KEEP": keep}, "dkdv": {"FOLD": config.fold}}
    return {**shared, **own.get(kernel, {})}


def gpu_family(device: torch.device) -> str:
    """The family whose configurations a device takes; ``interpreter`` for a CPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"the Triton kernels need compute capability 8.0 or later, {device} has {major}.{minor}"
        )
    if major in (9, 10, 11):
        return "sm_90"
    return "sm_80" if (major, minor) in ((8, 0), (8, 7)) else "sm_86"


def candidates(key: ConfigKey) -> list[TileConfig]:
    """Configurations for a key, the default first."""
    if key.kernel == "delta":
        return [_DELTA]
    if key.family == "interpreter":
        return [_INTERPRETER[key.kernel]]
    table = _HALF[key.kernel, key.family] if key.element_bytes == 2 else _SINGLE[key.kernel]
    return [config for config in table[max(64, key.head_dim)] if key.intervals <= config.most_intervals]


def tile_config(kernel: str, query: torch.Tensor, intervals: int) -> TileConfig:
    """What a kernel is launched with: the choice of :func:`choose`, else the default."""
    key = config_key(kernel, query, intervals)
    return _chosen.get(key) or candidates(key)[0]


def choose(key: ConfigKey, config: TileConfig | None) -> None:
    """Launch with ``config`` from now on in this process; None restores the default."""
    if config is None:
        _chosen.pop(key, None)
    else:
        _chosen[key] = config
