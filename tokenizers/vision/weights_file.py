"""Weights on disk: safetensors in float16 beside a JSON card; nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ernie5.tokenizers.vision.model import VisionModel, VisionModelConfig

# Part of the tokenizer's hash: raise it when preprocessing, quantiser or the meaning of codes change.
FORMAT_VERSION = 2
SHIPPED_WEIGHTS = Path(__file__).parent / "weights" / "image.safetensors"


def save_weights(model: VisionModel, path: Path, card: dict[str, object]) -> None:
    """Write ``path`` (float16 safetensors) and the card beside it (``.json``), config and digest added."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, path)
    path.chmod(0o644)  # safetensors writes for the owner alone; these files are packaged
    head = {"format_version": FORMAT_VERSION, "config": model.config.as_json(), "sha256": digest_of(path)}
    path.with_suffix(".json").write_text(json.dumps({**head, **card}, indent=1, ensure_ascii=False) + "\n")


def load_weights(path: Path | None = None) -> tuple[VisionModel, dict[str, object]]:
    """Read a float32 model in evaluation mode and its card; the shipped weights if ``path`` is None.

    Raises:
        FileNotFoundError: weights or card are missing.
        ValueError: another format version, or weights that are not the ones the card was written for.
    """
    path = path or SHIPPED_WEIGHTS
    card = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if card.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {card.get('format_version')}, this code reads {FORMAT_VERSION}; "
            "train it again or install the matching release"
        )
    digest = digest_of(path)
    if card.get("sha256") != digest:
        raise ValueError(
            f"{path} has sha256 {digest}, its card says {card.get('sha256')}; copy both files again"
        )
    model = VisionModel(VisionModelConfig.from_json(card["config"]))
    model.load_state_dict({name: value.to(torch.float32) for name, value in load_file(path).items()})
    return model.eval(), card


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
