"""Sample files of every modality, cut off or with a byte inverted: tokens or a reason, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tokenizers.hostile.files import flips, samples, truncations
from tests.tokenizers.hostile.worker import Reply

Tokenise = Callable[..., Reply]
SAMPLES = samples()
# Where a cut can't be told from a shorter file: what is left is a whole medium of its own.
_MAY_BE_WHOLE = {"text", "code", "table", "series", "molecule", "protein"}


@pytest.mark.parametrize("modality", SAMPLES)
def test_the_whole_sample_is_tokenised_or_the_modality_is_not_served(
    tokenise: Tokenise, modality: str
) -> None:
    reply = tokenise(modality, *SAMPLES[modality])
    if modality == "video" and reply.error == "UnsupportedMediaError":
        pytest.skip("the vision tokenizer has no weights for video")
    assert reply.outcome == "tokens", reply


@pytest.mark.parametrize("modality", SAMPLES)
def test_truncated_samples(tokenise: Tokenise, modality: str) -> None:
    data, content_type = SAMPLES[modality]
    replies = {length: tokenise(modality, part, content_type) for length, part in truncations(data)}
    assert replies[0].outcome == "refused" or modality in ("text", "code")
    if modality not in _MAY_BE_WHOLE:
        half = [reply for length, reply in replies.items() if length <= len(data) // 2]
        assert all(reply.outcome == "refused" for reply in half), half


@pytest.mark.parametrize("modality", SAMPLES)
def test_samples_with_a_byte_of_the_header_inverted(tokenise: Tokenise, modality: str) -> None:
    data, content_type = SAMPLES[modality]
    for _, damaged in flips(data):
        tokenise(modality, damaged, content_type)


@pytest.mark.parametrize("modality", SAMPLES)
def test_each_sample_as_every_other_modality(tokenise: Tokenise, modality: str) -> None:
    data, _ = SAMPLES[modality]
    for other in SAMPLES:
        if other != modality:
            tokenise(other, data, None)
