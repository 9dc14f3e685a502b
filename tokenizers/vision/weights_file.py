"""Weights on disk: safetensors in float16 beside a JSON card; nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ernie5.tokenizers.vision.model import VisionModel, VisionModelConfig

# Part of the tokenizer's hash: raise it when preprocessing, quantiser or the meaning of codes change.
FORMAT_VERSION = 2
SHIPPED_WEIGHTS = Path(__file__).parent / "weights" / "image.safetensors"


def save_weights(model: VisionModel, path: Path, card: dict[str, object]) -> None:
    """Write ``path`` (float16 safetensors) and the card beside it (``.json``), config and digest added."""
    head = {"format_version": FORMAT_VERSION, "config": model.config.as_json()}
    write_with_card(model.state_dict(), path, head, card)


def load_weights(path: Path | None = None) -> tuple[VisionModel, dict[str, object]]:
    """Read a float32 model in evaluation mode and its card; the shipped weights if ``path`` is None.

    Raises:
        FileNotFoundError: weights or card are missing.
        ValueError: another format version, or weights that are not the ones the card was written for.
    """
    path = path or SHIPPED_WEIGHTS
    card, tensors = read_with_card(path, FORMAT_VERSION)
    model = VisionModel(VisionModelConfig.from_json(card["config"]))
    model.load_state_dict(tensors)
    return model.eval(), card


def write_with_card(
    tensors: Mapping[str, Tensor], path: Path, head: Mapping[str, object], card: Mapping[str, object]
) -> None:
    """Write float16 tensors to ``path``, and beside it ``head``, the digest and ``card`` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.half().contiguous() for name, value in tensors.items()}, path)
    path.chmod(0o644)  # safetensors writes for the owner alone; these files are packaged
    text = json.dumps({**head, "sha256": digest_of(path), **card}, indent=1, ensure_ascii=False)
    path.with_suffix(".json").write_text(text + "\n")


def read_with_card(path: Path, format_version: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The card beside ``path`` and the file's tensors in float32.

    Raises:
        FileNotFoundError: one of the two is missing.
        ValueError: another format version, or tensors that are not the ones the card was written for.
    """
    card = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if card.get("format_version") != format_version:
        raise ValueError(
            f"{path} has format version {card.get('format_version')}, this code reads {format_version}; "
            "train it again or install the matching release"
        )
    digest = digest_of(path)
    if card.get("sha256") != digest:
        raise ValueError(
            f"{path} has sha256 {digest}, its card says {card.get('sha256')}; copy both files again"
        )
    return card, {name: value.to(torch.float32) for name, value in load_file(path).items()}


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
