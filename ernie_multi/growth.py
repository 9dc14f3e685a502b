"""What `ernie-multi grow` does: a model goes on with more bits a visual cell."""

from __future__ import annotations

import shutil
from pathlib import Path

from ernie5.backbone.model.growth import grow_bits
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError
from ernie5.tokenizers.vision.tokenizer import VisionTokenizer
from ernie_multi.interop import TEXT_MODEL
from ernie_multi.models import find_model, write_whole


def grow(model: Path | None, out: Path, *, bits: int, vision_weights: Path | None = None) -> None:
    """Write a model folder for codes of ``bits`` bits, to train on with `ernie-multi train --init`.

    Raises:
        InvalidInputError: no model, a folder that isn't empty, or bits that weights or model don't allow.
        TokenizerMismatchError: the model's pictures are of other weights, so their bits would mean others.
    """
    folder = find_model(model)
    backbone, hashes = load_model(folder)
    try:
        narrow = VisionTokenizer.load(vision_weights, bits=backbone.config.bits)
        wide = VisionTokenizer.load(vision_weights, bits=bits)
        grown = grow_bits(backbone, bits)
    except ValueError as error:
        raise InvalidInputError(str(error), param="bits") from None
    if hashes.get("vision", narrow.hash) != narrow.hash:
        raise TokenizerMismatchError(
            f"the model in {folder} was of vision tokenizer {hashes['vision'][:12]}, the weights at "
            f"hand are {narrow.hash[:12]} with {narrow.bits} bits; name its own weights, on the same device",
            param="vision_weights",
        )

    def write(target: Path) -> None:
        save_model(target, grown, {**hashes, "vision": wide.hash})
        if (folder / TEXT_MODEL).is_file():
            shutil.copyfile(folder / TEXT_MODEL, target / TEXT_MODEL)

    write_whole(out, write)
    print(f"{out}: {backbone.config.bits} to {bits} bits a cell; train it with --init {out}")
