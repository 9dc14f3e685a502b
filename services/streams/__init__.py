"""The token stream of a training run on Redis.

``TokenStream`` is the whole face for producers and workers, ``TokenFeed`` the trainer's ordered view::

    stream = TokenStream(connect(), "demo")
    stream.add_sample(epoch, position, sample, length=len(corpus))      # ingest
    for entry in stream.read_work("vision", consumer): ...              # a tokenizer replica
        stream.complete(entry, encode_span(span))
    with TokenFeed(stream, start=(0, 0)) as feed:                       # the trainer
        for position, sequence in feed: ...
        feed.commit(position_of_checkpoint)
"""

from ernie5.services.cache import DEFAULT_CACHE_BYTES, span_cache_key, variant_of
from ernie5.services.streams.feed import TokenFeed
from ernie5.services.streams.keys import (
    REQUESTS,
    SERVICES,
    DeadLetter,
    Failure,
    Position,
    RunKeys,
    Tombstone,
    WorkEntry,
    reply_key,
)
from ernie5.services.streams.producer import AddedSamples, IngestView, Producer
from ernie5.services.streams.run import RunStream
from ernie5.services.streams.work import Completion, WorkQueue


class TokenStream(WorkQueue, Producer):
    """All of a run's streams: what producers add, what workers settle, figures to look at."""


__all__ = [
    "DEFAULT_CACHE_BYTES",
    "REQUESTS",
    "SERVICES",
    "AddedSamples",
    "Completion",
    "DeadLetter",
    "Failure",
    "IngestView",
    "Position",
    "Producer",
    "RunKeys",
    "RunStream",
    "TokenFeed",
    "TokenStream",
    "Tombstone",
    "WorkEntry",
    "WorkQueue",
    "reply_key",
    "span_cache_key",
    "variant_of",
]
