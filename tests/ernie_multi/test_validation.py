"""Validation during `ernie-multi train` measures a corpus's held-out samples, with the run's tokenizers."""

import pytest

from ernie5.backbone.config import preset
from ernie5.backbone.model.transformer import Backbone
from ernie5.backbone.training.validation import read_validation
from ernie5.protocol.errors import TokenizerMismatchError
from ernie_multi.validation import held_out_validation


def test_held_out_samples_of_every_task_are_measured(tmp_path):
    config = preset("nano")
    validation = held_out_validation("mini", config, {}, tmp_path, every=3, samples=2)
    losses = validation.after(Backbone(config), 3)
    validation.close()
    assert set(losses["full"].nats) == {"text", "vision", "audio"}
    assert {row["step"] for row in read_validation(tmp_path / "validation.csv")} == {"3"}


def test_other_tokenizers_than_the_run_s_are_refused(tmp_path):
    with pytest.raises(TokenizerMismatchError, match="--validate-every"):
        held_out_validation("mini", preset("nano"), {"text": "0" * 32}, tmp_path, every=3, samples=1)
