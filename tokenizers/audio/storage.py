"""Shipped weights: float16 safetensors, each with its model's configuration in the file's metadata."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ernie5.tokenizers.audio.codec import MelCodec
from ernie5.tokenizers.audio.vocoder import Vocoder
from ernie5.tokenizers.audio.waveform import WaveformCodec

Model = TypeVar("Model", MelCodec, Vocoder, WaveformCodec)

SHIPPED = Path(__file__).parent / "weights"
CODEC_FILE, VOCODER_FILE, CARD_FILE = "codec.safetensors", "vocoder.safetensors", "audio.json"
WAVEFORM_FILE = "waveform.safetensors"

# The quantiser's averages serve training only.
_TRAINING_ONLY = ("quantiser.counts", "quantiser.sums")


def publish(module: MelCodec | Vocoder | WaveformCodec, path: Path) -> None:
    """Write ``module`` to ``path`` as float16, atomically."""
    tensors: dict[str, Tensor] = {
        name: tensor.detach().to(torch.float16).contiguous()
        for name, tensor in module.state_dict().items()
        if name not in _TRAINING_ONLY
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"config": json.dumps(module.config.as_json())})
    partial.chmod(0o644)
    os.replace(partial, path)


def read_codec(path: Path) -> MelCodec:
    """The codec in file ``path``, float32, ready for inference; ``ValueError`` where it is damaged."""
    return _read(path, MelCodec)


def read_vocoder(path: Path) -> Vocoder:
    """The vocoder in file ``path``, float32, ready for inference; ``ValueError`` where it is damaged."""
    return _read(path, Vocoder)


def read_waveform_codec(path: Path) -> WaveformCodec:
    """The waveform codec in file ``path``, float32; ``ValueError`` where it is damaged."""
    return _read(path, WaveformCodec)


def _read(path: Path, model: type[Model]) -> Model:
    try:
        with safe_open(path, framework="pt") as file:
            config = (file.metadata() or {}).get("config", "null")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    try:
        module = model(model.Config.from_json(json.loads(config)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no {model.__name__}: its configuration is {config}") from error
    expected = {name for name in module.state_dict() if name not in _TRAINING_ONLY}
    if expected != tensors.keys():
        odd = sorted(expected ^ tensors.keys())
        raise ValueError(f"{path} does not fit its configuration; tensors in one only: {', '.join(odd[:5])}")
    module.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    return module.requires_grad_(False).eval()
