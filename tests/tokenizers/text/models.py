"""Small SentencePiece models of every kind, trained on text of this repository."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece

ROOT = Path(__file__).parents[3]
EXACT = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
}


@cache
def _lines() -> tuple[str, ...]:
    return tuple((ROOT / "docs" / "tokenizers.md").read_text(encoding="utf-8").split("\n")[:150])


def trained(**options: Any) -> bytes:
    """A model of 500 pieces that keeps every text, but for the options."""
    model = io.BytesIO()
    settings = {"vocab_size": 500, "minloglevel": 2, "num_threads": 1} | EXACT | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(_lines()), model_writer=model, **settings)
    return model.getvalue()
