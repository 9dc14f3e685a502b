"""Protects dtype and compilation of the vision network: told by the hash, and close to the plain path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from ernie5.protocol.errors import TokenizerMismatchError
from ernie5.tokenizers.vision.execution import Execution
from ernie5.tokenizers.vision.model import VisionModel, VisionModelConfig
from ernie5.tokenizers.vision.preprocessing import ImageLimits
from ernie5.tokenizers.vision.tokenizer import VisionTokenizer

WAYS = {
    "plain": Execution("cpu"),
    "bfloat16": Execution("cpu", "bfloat16"),
    "compiled": Execution("cpu", compile=True, backend="aot_eager"),
    "both": Execution("cpu", "bfloat16", compile=True, backend="aot_eager"),
}


def make(execution: Execution) -> VisionTokenizer:
    """A small network, the same weights each time; the last layers of its blocks are not zero, as trained."""
    torch.manual_seed(0)
    model = VisionModel(VisionModelConfig(width=16))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    place = torch.device("cpu")
    return VisionTokenizer(model, "0" * 64, place, ImageLimits(), execution=execution)


def pictures() -> list[Image.Image]:
    """On three grids, two on one of them."""
    sizes = [(64, 64), (28, 28), (64, 64), (60, 100)]
    ramps = [np.indices(size).sum(0) * (2 + place) % 256 for place, size in enumerate(sizes)]
    return [Image.fromarray(ramp.astype(np.uint8)).convert("RGB") for ramp in ramps]


def test_every_way_has_a_hash_of_its_own() -> None:
    hashes = {name: make(execution).hash for name, execution in WAYS.items()}
    assert len(set(hashes.values())) == len(WAYS)
    assert hashes["plain"] == make(Execution("cpu")).hash
    span = make(WAYS["plain"]).encode(pictures()[0])
    with pytest.raises(TokenizerMismatchError, match="cpu/bfloat16"):
        make(WAYS["bfloat16"]).decode(span)


@pytest.mark.parametrize("name", WAYS)
def test_codes_do_not_depend_on_the_batch(name: str) -> None:
    tokenizer = make(WAYS[name])
    alone = [tokenizer.encode(picture) for picture in pictures()]
    assert tokenizer.encode_batch(pictures()) == alone


def test_compiled_and_half_precision_stay_close_to_the_plain_path() -> None:
    plain = make(WAYS["plain"])
    spans = plain.encode_batch(pictures(), latent=True)
    drawn = [np.asarray(plain.decode(span), int) for span in spans]
    for name, tolerance in (("compiled", 1e-3), ("bfloat16", 0.1), ("both", 0.1)):
        other = make(WAYS[name])
        for span, like, picture in zip(spans, other.encode_batch(pictures(), latent=True), drawn):
            scale = np.abs(span.latent.astype(float)).max()
            assert np.abs(like.latent.astype(float) - span.latent).max() <= tolerance * scale, name
            again = np.asarray(other.decode(_of(span, other.hash)), int)
            assert np.abs(again - picture).mean() <= 255 * tolerance, name
            assert like.codes.dtype == span.codes.dtype and other.device.type == "cpu"


def _of(span, tokenizer: str):
    return type(span)(span.modality, span.layout, span.codes, tokenizer)


@pytest.mark.slow
def test_the_default_compiler_agrees() -> None:
    plain, compiled = make(WAYS["plain"]), make(Execution("cpu", compile=True))
    picture = Image.new("RGB", (28, 28), "teal")
    left, right = plain.encode(picture, latent=True), compiled.encode(picture, latent=True)
    assert left.latent is not None and right.latent is not None
    assert np.allclose(left.latent.astype(float), right.latent, atol=1e-2)


def test_impossible_ways_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        Execution("cpu", "float16")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device is here; take device 'cpu'"):
            Execution("cuda")
