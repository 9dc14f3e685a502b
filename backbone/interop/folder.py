"""The weights of a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ernie5.protocol.errors import InvalidInputError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ``InvalidInputError`` when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"{path.parent} lacks {path.name}") from None
    except ValueError as error:
        raise InvalidInputError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidInputError(f"{path} holds no JSON object")
    return content


class WeightFolder:
    """Tensors by name, read one at a time, so that a network larger than half the memory can be loaded.

    Raises:
        InvalidInputError: no safetensors are there (pickles are refused: they can run code), or they are
            damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._taken: set[str] = set()
        for name in self._names():
            try:
                file = safe_open(folder / name, framework="pt")
            except FileNotFoundError:
                raise InvalidInputError(f"{folder} lacks {name}, which its index names") from None
            except SafetensorError as error:
                raise InvalidInputError(f"{folder / name} is damaged: {error}") from None
            self._files[name] = file
            self._file_of |= dict.fromkeys(file.keys(), name)

    def _names(self) -> list[str]:
        if (self.folder / _SINGLE).is_file():
            return [_SINGLE]
        if not (self.folder / _INDEX).is_file():
            pickles = sorted(path.name for pattern in _PICKLES for path in self.folder.glob(pattern))
            if pickles:
                raise InvalidInputError(
                    f"{self.folder} holds its weights as pickles ({pickles[0]}), which can run code when "
                    "they are read; convert them to safetensors first"
                )
            raise InvalidInputError(f"{self.folder} holds neither {_SINGLE} nor {_INDEX}")
        table = read_json(self.folder / _INDEX).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise InvalidInputError(f"{self.folder / _INDEX} has no weight_map")
        names = sorted({str(name) for name in table.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise InvalidInputError(
                    f"{_INDEX} names {name!r}, which is no safetensors file of its folder"
                )
        return names

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name`` of exactly this shape, in the file's float type.

        Raises:
            InvalidInputError: it is missing, or of another shape or type.
        """
        if name not in self._file_of:
            raise InvalidInputError(f"{self.folder} lacks the weight {name}")
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        if tensor.shape != shape:
            raise InvalidInputError(
                f"{name} has shape {list(tensor.shape)}; its config.json asks for {list(shape)}"
            )
        if tensor.dtype not in _DTYPES:
            raise InvalidInputError(f"{name} is {tensor.dtype}; readable are float32, bfloat16 and float16")
        self._taken.add(name)
        return tensor

    def left(self) -> list[str]:
        """Names that nobody took, in order."""
        return sorted(set(self._file_of) - self._taken)
