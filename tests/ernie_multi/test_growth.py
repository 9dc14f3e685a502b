"""A model with more bits a cell answers as before until it is trained, and is tied to the wider tokenizer."""

import json

import pytest
import torch

from ernie5.backbone.config import preset
from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.growth import grow_bits
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import pack
from ernie5.backbone.training.checkpoint import load_model, save_model
from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.tokens import ScalesLayout, TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary
from ernie5.tokenizers.vision.model import VisionModel, VisionModelConfig
from ernie5.tokenizers.vision.tokenizer import VisionTokenizer
from ernie5.tokenizers.vision.weights_file import save_weights
from ernie_multi.growth import grow

NARROW = preset("nano").model_copy(update={"bits": 12})


def _picture(bits, seed):
    """A drawn picture of ``bits`` bits whose low ones depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    schedule = schedule_for((4, 4))
    codes = torch.randint(0, 1 << 16, (21,), generator=generator).numpy().astype("uint32")
    return TokenSpan("image", ScalesLayout(bits, schedule), codes & (1 << bits) - 1, "")


def _forward(model, bits):
    span = _picture(bits, 0)
    sequence = TokenSequence("", (TokenSegment(span, "target"),))
    layout = lay_out(sequence, model.config, UnifiedVocabulary(model.config.text_vocabulary))
    return model(pack([[layout]], 64, model.config))


@torch.no_grad()
def test_old_bits_keep_their_odds_when_new_ones_carry_nothing():
    model = Backbone(NARROW, seed=1).eval()
    grown = grow_bits(model, 16)
    before, after = _forward(model, 12), _forward(grown, 16)
    assert after.bits.shape[1] == 16 and not after.bits[:, 12:].any()
    torch.testing.assert_close(after.bits[:, :12], before.bits, atol=1e-5, rtol=0)
    torch.testing.assert_close(after.text, before.text, atol=1e-5, rtol=0)
    grown.heads.bits.weight[12:].normal_()
    assert _forward(grown, 16).bits[:, 12:].any()


def test_a_model_does_not_shrink():
    with pytest.raises(ValueError, match="12 bits can grow to 13 to 32, not to 12"):
        grow_bits(Backbone(NARROW), 12)


def test_the_command_checks_that_the_tokens_nest(tmp_path):
    torch.manual_seed(0)
    weights = tmp_path / "image.safetensors"
    save_weights(VisionModel(VisionModelConfig(width=16, bit_widths=(12, 16))), weights, {})
    narrow = VisionTokenizer.load(weights)
    save_model(tmp_path / "model", Backbone(NARROW), {"vision": narrow.hash, "text": "t"})
    grow(tmp_path / "model", tmp_path / "grown", bits=16, vision_weights=weights)
    model, hashes = load_model(tmp_path / "grown")
    assert model.config.bits == 16
    assert hashes == {"vision": VisionTokenizer.load(weights, bits=16).hash, "text": "t"}
    with pytest.raises(InvalidInputError, match="empty folder"):
        grow(tmp_path / "model", tmp_path / "grown", bits=16, vision_weights=weights)
    with pytest.raises(InvalidInputError, match="12 or 16 bits a cell, not 20"):
        grow(tmp_path / "model", tmp_path / "other", bits=20, vision_weights=weights)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["tokenizers"]["vision"] = "0" * 32
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerMismatchError, match="000000000000"):
        grow(tmp_path / "model", tmp_path / "other", bits=16, vision_weights=weights)
    assert not (tmp_path / "other").exists()
