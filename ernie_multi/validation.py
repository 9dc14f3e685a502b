"""`ernie-multi train --validate-every N`: losses of sub-models on held-out samples while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError, TokenizerMismatchError
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.tokens import TokenSegment, TokenSequence, TokenSpan

if TYPE_CHECKING:
    from ernie5.backbone.config import BackboneConfig
    from ernie5.backbone.training.validation import SubModelValidation
    from ernie5.tokenizers.base import Tokenizer


def held_out_validation(
    data: str,
    config: BackboneConfig,
    tokenizers: Mapping[str, str],
    out: Path,
    *,
    every: int,
    samples: int = 16,
    row_length: int = 1024,
) -> SubModelValidation:
    """Curves of sub-models on ``samples`` random held-out samples of each task, tokenised in this process.

    Args:
        data: a corpus by name, or a path.
        tokenizers: service to hash of the tokenizers that the run trains with.
        out: the run's folder; see :class:`~ernie5.backbone.training.validation.SubModelValidation`.
        every: steps between two measurements.

    Raises:
        InvalidInputError: no such corpus, or one without a held-out split.
        TokenizerMismatchError: the installed tokenizers are not those of the run.
    """
    from ernie5.backbone.elastic.calibration import calibration_batches
    from ernie5.backbone.training.validation import SubModelValidation
    from ernie5.corpora.corpus import open_corpus

    corpus = open_corpus(data, "test")
    if not len(corpus):
        raise InvalidInputError(f"{data} holds out no samples to validate on; leave --validate-every out")
    generator = np.random.default_rng(0)
    chosen = [
        index
        for task in corpus.tasks
        for index in generator.permutation(corpus.indices(task))[:samples].tolist()
    ]
    loaded: dict[str, Tokenizer] = {}

    def encoded(index: int) -> TokenSequence:
        sample = corpus[index]
        parts = []
        for segment in sample.segments:
            service = modality_of(segment.modality).service
            if service not in loaded:
                loaded[service] = _checked(service, tokenizers)
            (span,) = loaded[service].encode_segments([segment], features=True)
            if isinstance(span, ErnieMultiError):
                raise span
            assert isinstance(span, TokenSpan)
            parts.append(TokenSegment(span, segment.role))
        return TokenSequence(sample.sample_id, tuple(parts))

    rows = calibration_batches(map(encoded, chosen), config, row_length=row_length)
    return SubModelValidation(rows, out, every=every)


def _checked(service: str, tokenizers: Mapping[str, str]) -> Tokenizer:
    from ernie5.services.tokenizer_service import load_tokenizer

    tokenizer = load_tokenizer(service)
    expected = tokenizers.get(service)
    if expected is not None and tokenizer.hash != expected:
        raise TokenizerMismatchError(
            f"the run trains with {service} tokenizer {expected[:12]}, installed here is "
            f"{tokenizer.hash[:12]}; install that version, or leave --validate-every out"
        )
    return tokenizer
