"""The merger of understanding features: one encoder as ever, two in the report's form (section 2.2.2)."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ernie5.backbone.layout import lay_out
from ernie5.backbone.model.embeddings import FeatureMerger
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.rows import pack
from ernie5.protocol.errors import InvalidInputError
from tests.backbone.samples import NANO, VOCABULARY, picture, sequence, text

BOTH = NANO.model_copy(update={"features": {"cnn": 96, "vit": 64}})


def seeing(segment, rng):
    """The same picture with features of both encoders."""
    cnn = segment.span.features["cnn"]
    vit = rng.standard_normal((*cnn.shape[:2], 64)).astype(np.float16)
    span = dataclasses.replace(segment.span, features={"cnn": cnn, "vit": vit})
    return dataclasses.replace(segment, span=span)


def test_one_encoder_keeps_the_weights_it_had():
    shapes = {name: tuple(value.shape) for name, value in FeatureMerger({"cnn": 96}, 64).state_dict().items()}
    assert shapes == {
        "project.cnn.weight": (96, 96),
        "project.cnn.bias": (96,),
        "place.cnn": (64, 96),
        "norm.weight": (96,),
        "norm.bias": (96,),
        "qkv.weight": (288, 96),
        "mix.weight": (96, 96),
        "out_norm.weight": (96,),
        "out_norm.bias": (96,),
        "out.weight": (64, 96),
        "out.bias": (64,),
    }


@pytest.mark.parametrize("patches", [4, 16])
def test_two_encoders_attend_to_one_another_and_are_averaged(patches):
    """Against the report's form written out: 2K items, attention among them, mean, one linear layer."""
    torch.manual_seed(0)
    merger = FeatureMerger({"cnn": 96, "vit": 64}, 48)
    for place in merger.place.values():
        torch.nn.init.normal_(place)
    features = {"cnn": torch.randn(5, patches, 96), "vit": torch.randn(5, patches, 64)}
    merged = merger(features)
    items = torch.cat(
        [merger.project[name](features[name]) + merger.place[name][:patches] for name in ("cnn", "vit")], 1
    )
    assert items.shape == (5, 2 * patches, 64)  # the semantic encoder's width
    normed = F.layer_norm(items, (64,), merger.norm.weight, merger.norm.bias)
    mixed, _ = F.multi_head_attention_forward(
        normed.transpose(0, 1),
        normed.transpose(0, 1),
        normed.transpose(0, 1),
        64,
        merger.heads,
        merger.qkv.weight,
        None,
        None,
        None,
        False,
        0.0,
        merger.mix.weight,
        None,
    )
    pooled = (items + mixed.transpose(0, 1)).mean(1)
    expected = merger.out(F.layer_norm(pooled, (64,), merger.out_norm.weight, merger.out_norm.bias))
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-4)


def test_a_picture_seen_by_both_goes_through_the_network():
    rng = np.random.default_rng(0)
    segment = seeing(picture(rng, "context"), rng)
    sample = sequence(segment, text(rng, "context"), text(rng, "target", 2))
    layout = lay_out(sample, BOTH, VOCABULARY)
    batch = pack([[layout]], len(layout), BOTH)
    assert {name: tuple(values.shape) for name, values in batch.features.items()} == {
        "cnn": (4, 4, 96),
        "vit": (4, 4, 64),
    }
    embeddings = Backbone(BOTH).embeddings
    seen = embeddings(batch)
    batch.features["vit"] = batch.features["vit"] + 1
    assert not torch.equal(embeddings(batch), seen)


def test_a_span_without_the_second_encoder_is_refused_and_one_with_it_fits_the_first_alone():
    rng = np.random.default_rng(0)
    segment = picture(rng, "context")
    with pytest.raises(InvalidInputError, match="'vit' features"):
        lay_out(sequence(segment, text(rng, "target")), BOTH, VOCABULARY)
    layout = lay_out(sequence(seeing(segment, rng), text(rng, "target")), NANO, VOCABULARY)
    assert set(layout.features) == {"cnn"}
