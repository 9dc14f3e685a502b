"""Model folders and training checkpoints: safetensors and JSON, written whole or not at all.

A model folder holds ``config.json`` (shape and the tokenizers' hashes) and ``model.safetensors``. A
checkpoint adds ``optimizer.safetensors`` and ``state.json``, which holds the stream position.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.model.transformer import Backbone
from ernie5.protocol.errors import InvalidInputError

FORMAT = 1


def save_model(folder: Path, model: Backbone, tokenizers: Mapping[str, str]) -> None:
    """Write ``config.json`` and ``model.safetensors``; ``tokenizers`` maps service to tokenizer hash."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.cpu().contiguous() for name, value in model.state_dict().items()},
        folder / "model.safetensors",
    )
    head = {
        "format": FORMAT,
        "architecture": "ernie-multi-backbone",
        "backbone": model.config.model_dump(mode="json"),
        "tokenizers": dict(tokenizers),
    }
    (folder / "config.json").write_text(json.dumps(head, indent=2, ensure_ascii=False) + "\n")


def read_config(folder: Path) -> tuple[BackboneConfig, dict[str, str]]:
    """Shape and tokenizer hashes of a model folder.

    Raises:
        InvalidInputError: there is no readable model at ``folder``.
    """
    path = folder / "config.json"
    try:
        head = json.loads(path.read_text())
        if head["format"] != FORMAT:
            raise InvalidInputError(f"{path} has format {head['format']}; this version reads {FORMAT}")
        return BackboneConfig.model_validate(head["backbone"]), dict(head["tokenizers"])
    except FileNotFoundError:
        raise InvalidInputError(f"{folder} holds no model: {path.name} is missing") from None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path} is not a model's configuration: {error}") from None


def load_model(folder: Path) -> tuple[Backbone, dict[str, str]]:
    """The model of a folder and its tokenizers' hashes, ready to answer.

    Raises:
        InvalidInputError: there is no model, or its weights don't fit its configuration.
    """
    config, tokenizers = read_config(folder)
    model = Backbone(config)
    path = folder / "model.safetensors"
    try:
        model.load_state_dict(load_file(path))
    except FileNotFoundError:
        raise InvalidInputError(f"{folder} holds no weights: {path.name} is missing") from None
    except (SafetensorError, RuntimeError) as error:
        raise InvalidInputError(f"{path} can't be loaded: {error}") from None
    return model.eval(), tokenizers


def save_checkpoint(
    root: Path,
    step: int,
    model: Backbone,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    tokenizers: Mapping[str, str],
    *,
    keep: int = 2,
) -> Path:
    """Write ``root/step-00000123`` by way of a temporary folder, then drop all but the ``keep`` newest.

    ``state`` is JSON: the stream position and whatever else the trainer needs to go on to the bit.
    """
    final = root / f"step-{step:08d}"
    temporary, replaced = root / f".{final.name}.{os.getpid()}", root / f".{final.name}.replaced"
    for left_by_a_crash in root.glob(".step-*"):
        shutil.rmtree(left_by_a_crash)
    save_model(temporary, model, tokenizers)
    names = _parameter_names(model, optimizer)
    slots = optimizer.state_dict()["state"]
    tensors = {
        f"{key}/{names[index]}": value.cpu().contiguous()
        for index, values in slots.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    save_file(tensors, temporary / "optimizer.safetensors")
    (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n")
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    _sync_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints below ``root``, oldest first."""
    return sorted(path for path in root.glob("step-*") if (path / "state.json").exists())


def load_checkpoint(folder: Path, model: Backbone, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore weights and optimizer state in place; returns the content of ``state.json``.

    They come to lie where the model does, wherever that was when the checkpoint was written.

    Raises:
        InvalidInputError: the checkpoint belongs to a network of another shape, or is damaged.
    """
    config, _ = read_config(folder)
    if config != model.config:
        raise InvalidInputError(
            f"{folder} was trained with another configuration; give the same preset, or start anew"
        )
    names = _parameter_names(model, optimizer)
    index = {name: position for position, name in enumerate(names)}
    slots: dict[int, dict[str, torch.Tensor]] = {}
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        with safe_open(folder / "optimizer.safetensors", framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                slot, name = key.split("/", 1)
                slots.setdefault(index[name], {})[slot] = file.get_tensor(key)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise InvalidInputError(
            f"checkpoint {folder} can't be read: {error}; remove it to go on from the one before"
        ) from None
    head = optimizer.state_dict()
    optimizer.load_state_dict({"state": slots, "param_groups": head["param_groups"]})
    return state


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _parameter_names(model: Backbone, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters in the order it numbers them: group by group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
