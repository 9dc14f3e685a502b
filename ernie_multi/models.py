"""Which trained model is meant: the one named, else the environment's, else that of the newest run."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ernie5.protocol.errors import InvalidInputError

MODEL_VARIABLE = "ERNIE_MULTI_MODEL"
RUNS = Path("runs")
_FILES = ("config.json", "model.safetensors")


def find_model(
    model: str | os.PathLike[str] | None = None,
    *,
    runs: Path = RUNS,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """The folder of a model: one that holds ``config.json`` and ``model.safetensors``.

    ``model`` is such a folder, or a run's folder, of which the newest model is taken. Without it the variable
    ``ERNIE_MULTI_MODEL`` counts, and without that the newest model below ``runs``.

    Raises:
        InvalidInputError: there is no model there; without any, the message names `make demo`.
    """
    named = model if model is not None else environ.get(MODEL_VARIABLE)
    if named:
        folder = Path(named).expanduser()
        found = newest(models_below(folder))
        if found is None:
            source = "" if model is not None else f" (from {MODEL_VARIABLE})"
            raise InvalidInputError(
                f"{folder}{source} holds no model: no folder in it has {' and '.join(_FILES)}",
                param="model",
            )
        return found
    found = newest(path for run in _folders(runs) for path in models_below(run))
    if found is None:
        raise InvalidInputError(
            f"no model is named and none lies below {runs.resolve()}; train one with `make demo` or "
            f"`ernie-multi train`, or name one by --model or {MODEL_VARIABLE}",
            param="model",
        )
    return found


def models_below(folder: Path) -> Iterator[Path]:
    """``folder`` itself where it is a model, else the models in it and in its sub-folders."""
    if _is_model(folder):
        yield folder
        return
    for child in _folders(folder):
        if _is_model(child):
            yield child
        else:
            yield from (grandchild for grandchild in _folders(child) if _is_model(grandchild))


def newest(models: Iterable[Path]) -> Path | None:
    """The model whose weights were written last; of equally old ones the last by name."""
    written = []
    for path in models:
        # A trainer may drop an old checkpoint meanwhile.
        with contextlib.suppress(FileNotFoundError):
            written.append(((path / _FILES[1]).stat().st_mtime_ns, path.name, path))
    return max(written)[2] if written else None


def _is_model(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _folders(folder: Path) -> list[Path]:
    # A checkpoint that is being written has a name with a dot in front.
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def write_whole(out: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder beside ``out`` and move it there, so that a failure leaves nothing half written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInputError(f"{out} exists and isn't an empty folder; name another", param="out")
    temporary = out.resolve().with_name(f".{out.resolve().name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(temporary)
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
