"""BPE-dropout on the way to training: the same cuts whatever the batches and workers, and none over HTTP."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError
from ernie5.protocol.samples import Sample, Segment
from ernie5.services.redis_client import connect
from ernie5.services.streams import TokenFeed, TokenStream, variant_of
from ernie5.services.tokenizer_service import load_tokenizer
from ernie5.services.tokenizer_settings import TextPoolSettings, TokenizerServiceSettings
from ernie5.services.worker import drain
from ernie5.tokenizers.text.dropout import BpeDropout

WORDS = "In the beginning God created the heaven and the earth."
SAMPLES = [
    # The same words come again, also as the answer of the same sample.
    Sample(segments=tuple(Segment(modality="text", text=f"{WORDS} {index % 3}") for _ in range(2)))
    for index in range(9)
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("text")


@pytest.fixture
def cut(server, client, tokenizer):
    """The codes of :data:`SAMPLES` after a run of its own."""

    def run(name: str, batch: int, dropout: BpeDropout | None, workers: int = 1) -> list[list[np.ndarray]]:
        stream = TokenStream(client, name, claim_idle_ms=200)
        stream.add_samples(list(enumerate(SAMPLES)))
        stop = threading.Event()
        threads = [
            threading.Thread(
                target=drain,
                args=(tokenizer, TokenStream(connect(server.url), name, claim_idle_ms=200), stop, batch),
                kwargs={"features": False, "block_ms": 20, "dropout": dropout},
            )
            for _ in range(workers)
        ]
        for thread in threads:
            thread.start()
        try:
            with TokenFeed(stream, length=len(SAMPLES), end=(1, 0), timeout_s=60) as feed:
                return [[segment.span.codes for segment in value.segments] for _, value in feed]
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    return run


def same(one: list[list[np.ndarray]], other: list[list[np.ndarray]]) -> bool:
    return all(
        np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_cuts_are_those_of_the_sample_s_place_whatever_the_batches_and_workers(cut, tokenizer):
    dropout = BpeDropout(0.3, seed=7)
    drawn = cut("drawn", 8, dropout)
    assert same(drawn, cut("again", 1, dropout))
    assert same(drawn, cut("four", 3, dropout, workers=4))
    assert not same(drawn, cut("other-seed", 8, BpeDropout(0.3, seed=8)))
    plain = cut("plain", 8, None)
    assert same(plain, cut("nothing-dropped", 8, BpeDropout(0.0, seed=7))) and not same(plain, drawn)
    assert all(np.array_equal(*pair) for pair in plain)
    # Words that come again are cut anew: nothing of one sample is taken from the cache for another.
    assert not np.array_equal(drawn[0][0], drawn[3][0])
    spans = tokenizer.encode_segments([SAMPLES[4].segments[0]], dropout=dropout, positions=[4])
    assert np.array_equal(spans[0].codes, drawn[4][0])
    assert tokenizer.decode_spans(spans)[0].data.decode() == f"{WORDS} 1"


def test_workers_of_one_run_have_one_dropout(client, tokenizer):
    run = TokenStream(client, "mixed")
    first = variant_of(features=False, latent=False, dropout=BpeDropout(0.1, seed=1))
    run.register_tokenizer("text", tokenizer.hash, first)
    for other in (None, BpeDropout(0.2, seed=1), BpeDropout(0.1, seed=2)):
        with pytest.raises(TokenizerMismatchError, match="dropout"):
            drain(tokenizer, run, threading.Event(), features=False, dropout=other)


def test_the_environment_sets_it(monkeypatch):
    from ernie5.protocol.settings import load_settings

    monkeypatch.setenv("ERNIE_MULTI_SERVICE_TEXT_DROPOUT", "0.1")
    monkeypatch.setenv("ERNIE_MULTI_SERVICE_TEXT_DROPOUT_SEED", "3")
    text = load_settings(TokenizerServiceSettings).text
    assert (text.dropout, text.dropout_seed) == (0.1, 3)
    monkeypatch.setenv("ERNIE_MULTI_SERVICE_TEXT_DROPOUT", "1.5")
    with pytest.raises(InvalidInputError, match="less than or equal to 1"):
        load_settings(TokenizerServiceSettings)
    assert TextPoolSettings().dropout == 0
