"""Property: whatever workers and Redis do, the trainer gets every sample once, in order, with the same
tokens.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ernie5.services.ingest import Ingest
from ernie5.services.streams import Position, TokenFeed, TokenStream, Tombstone
from tests.services.stream_helpers import (
    SERVICES,
    Corpus,
    expected_payloads,
    in_order,
    ingesting,
    payloads,
    sample_of,
    span_bytes,
    workers,
)

LENGTH = 6
EPOCHS = 2

_LOSSES = ("everything", "tokens", "work", "group", "cache", "records", "cursor", "position")
_STEPS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 4)),
    st.tuples(st.just("read"), st.sampled_from(SERVICES), st.integers(1, 4)),
    st.tuples(st.just("complete"), st.integers(0, 99)),
    st.tuples(st.just("repeat"), st.integers(0, 99)),
    st.tuples(st.just("fail"), st.integers(0, 99)),
    st.tuples(st.just("release"), st.integers(0, 99)),
    st.tuples(st.just("crash")),
    st.tuples(st.just("lose"), st.sampled_from(_LOSSES)),
)


def lose(client, what: str) -> None:
    """Remove a part of the run as if it never had been."""
    names = {
        "everything": ["*"],
        "tokens": ["test:tokens"],
        "work": ["test:work:*"],
        "cache": ["cache:*"],
        "records": ["test:sample:*", "test:open"],
        "cursor": ["test:ingest"],
        "position": ["test:position"],
    }
    if what == "group":
        for service in SERVICES:
            if client.exists(f"test:work:{service}"):
                client.xgroup_destroy(f"test:work:{service}", "tokenizers")
        return
    for pattern in names[what]:
        for name in client.scan_iter(match=pattern, count=1000):
            client.delete(name)


def play(stream: TokenStream, steps) -> None:
    """Take the steps one after another; ``held`` is what workers have in hand, ``settled`` what they
    completed.
    """
    held, settled = [], []
    for number, (what, *details) in enumerate(steps):
        if what == "add":
            cursor = max(stream.open_cursor(0), 0)
            until = min(cursor + details[0], LENGTH * EPOCHS)
            stream.add_samples([(ordinal, sample_of(ordinal % LENGTH)) for ordinal in range(cursor, until)])
        elif what == "read":
            held += stream.read_work(details[0], f"w{number % 3}", details[1], 0)
        elif what == "crash":
            held = []
        elif what == "lose":
            lose(stream.client, details[0])
        elif what == "repeat":
            if settled:
                entry = settled[details[0] % len(settled)]
                stream.complete(entry, span_bytes(entry))
        elif held:
            entry = held.pop(details[0] % len(held))
            if what == "complete":
                stream.complete(entry, span_bytes(entry))
                settled.append(entry)
            elif what == "fail":
                stream.fail(entry, RuntimeError("stumbled"), final=False)
            else:
                stream.release([entry])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_STEPS, max_size=40))
def test_order_survives_crashes_repetitions_and_losses(client, steps):
    client.flushall()
    # Entries are claimed at once, so workers that still hold them compete with those that claim them.
    stream = TokenStream(client, "test", claim_idle_ms=1, max_attempts=10_000)
    play(stream, steps)
    ingest = Ingest(stream, Corpus(LENGTH), epochs=EPOCHS, order=in_order, batch_size=3)
    with (
        TokenFeed(stream, end=(EPOCHS, 0), probe_s=0.02, timeout_s=90) as feed,
        ingesting(ingest),
        workers(lambda: TokenStream(client, "test", claim_idle_ms=20, max_attempts=10_000)),
    ):
        received = list(feed)
    assert [position for position, _ in received] == [
        Position(epoch, position) for epoch in range(EPOCHS) for position in range(LENGTH)
    ]
    for position, value in received:
        assert not isinstance(value, Tombstone), value
        assert payloads(value) == expected_payloads(sample_of(position.position))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(list(range(12))),
    start=st.integers(0, 11),
    prefetch=st.integers(1, 5),
)
def test_out_of_order_publication_is_put_in_order(client, order, start, prefetch):
    client.flushall()
    stream = TokenStream(client, "test")
    stream.add_samples([(index, sample_of(index)) for index in range(12)])
    entries = [entry for service in SERVICES for entry in stream.read_work(service, "w", 100, 0)]
    for ordinal in order:
        for entry in entries:
            if entry.ordinal == ordinal:
                stream.complete(entry, span_bytes(entry))
    with TokenFeed(stream, (0, start), length=12, end=(1, 0), prefetch=prefetch, timeout_s=90) as feed:
        received = list(feed)
    assert [position.position for position, _ in received] == list(range(start, 12))
    assert [sequence.metadata["index"] for _, sequence in received] == list(range(start, 12))
