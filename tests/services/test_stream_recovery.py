"""Losses in the middle of a run: the trainer still gets the same tokens in the same order."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from ernie5.services.ingest import Ingest
from ernie5.services.redis_client import connect
from ernie5.services.redis_server import start_server
from ernie5.services.streams import Position, TokenFeed, TokenStream
from ernie5.services.trainer_feed import TrainerFeed
from tests.services.stream_helpers import (
    SERVICES,
    Corpus,
    expected_payloads,
    in_order,
    ingesting,
    payloads,
    sample_of,
    settle_all,
    span_bytes,
    workers,
)

LENGTH = 40


def check(received, start: int = 0) -> None:
    assert [position for position, _ in received] == [
        Position.of(ordinal, LENGTH) for ordinal in range(start, start + len(received))
    ]
    for position, sequence in received:
        assert payloads(sequence) == expected_payloads(sample_of(position.position))


@pytest.mark.parametrize("losses", [1, 4])
def test_losing_everything_in_the_middle_changes_nothing(stream, make_stream, losses):
    ingest = Ingest(make_stream(), Corpus(LENGTH), epochs=5, order=in_order, high_water=16, entry_mark=64)
    received = []
    with (
        TokenFeed(make_stream(), end=(5, 0), timeout_s=90, probe_s=0.05, prefetch=4) as feed,
        ingesting(ingest),
        workers(make_stream, features=False),
    ):
        for item in feed:
            received.append(item)
            if len(received) % (200 // (losses + 1)) == 0 and len(received) < 200:
                stream.client.flushall()
            if len(received) % 25 == 0:
                feed.commit(feed.position)
    assert len(received) == 200
    check(received)


def test_a_killed_server_comes_back_with_its_data(tmp_path: Path, binary: Path):
    """``kill -9`` of Redis: what the append-only file lacks is made again."""
    folder = tmp_path / "redis"
    server = start_server(folder, binary=binary)
    port, password = server.port, server.url.split(":")[2].split("@")[0]
    url = server.url

    def make_stream() -> TokenStream:
        return TokenStream(connect(url, check=False, retries=0), "test", claim_idle_ms=200)

    received = []
    try:
        ingest = Ingest(make_stream(), Corpus(LENGTH), epochs=4, order=in_order, high_water=16, entry_mark=64)
        with (
            TokenFeed(make_stream(), end=(4, 0), timeout_s=90, probe_s=0.05, prefetch=4) as feed,
            ingesting(ingest),
            workers(make_stream, features=False),
        ):
            for item in feed:
                received.append(item)
                if len(received) in (50, 100):
                    server.process.send_signal(signal.SIGKILL)
                    server.process.wait()
                    server = start_server(folder, binary=binary, port=port, password=password)
                if len(received) % 30 == 0:
                    feed.commit(feed.position)
    finally:
        server.stop()
    assert len(received) == 4 * LENGTH
    check(received)


def test_a_trainer_that_died_goes_on_from_its_checkpoint(stream, make_stream):
    ingest = Ingest(make_stream(), Corpus(LENGTH), epochs=3, order=in_order, high_water=16, entry_mark=64)
    with ingesting(ingest), workers(make_stream, features=False):
        with TrainerFeed(make_stream(), timeout_s=90) as first:
            for _ in range(30):
                next(first)
            checkpoint = first.state()
            first.commit()
            for _ in range(15):
                next(first)
        with TokenFeed(make_stream(), (0, 30), end=(3, 0), timeout_s=90, probe_s=0.05) as second:
            received = list(second)
    assert checkpoint == {"epoch": 0, "position": 30}
    check(received, start=30)
    assert len(received) == 3 * LENGTH - 30


def test_an_older_checkpoint_brings_back_what_was_trimmed(stream, make_stream):
    ingest = Ingest(make_stream(), Corpus(LENGTH), order=in_order, high_water=16, entry_mark=64)
    with ingesting(ingest), workers(make_stream, features=False):
        with TokenFeed(make_stream(), timeout_s=90) as feed:
            for _ in range(35):
                feed.next()
            feed.commit((0, 35))
        with TokenFeed(make_stream(), (0, 5), timeout_s=90, probe_s=0.05) as feed:
            check([feed.next() for _ in range(60)], start=5)


def test_a_damaged_span_in_the_cache_is_made_again(stream, make_stream):
    stream.add_samples([(index, sample_of(index)) for index in range(8)])
    settle_all(stream)
    damaged = 0
    for name in stream.client.scan_iter(match="cache:*:-"):
        value = stream.client.get(name)
        stream.client.set(name, value[:-1] + bytes([value[-1] ^ 1]))
        damaged += 1
    assert damaged > 8
    ingest = Ingest(make_stream(), Corpus(8), epochs=1, order=in_order)
    with (
        TokenFeed(make_stream(), end=(1, 0), timeout_s=90, probe_s=0.02) as feed,
        ingesting(ingest),
        workers(make_stream, features=False),
    ):
        received = list(feed)
    assert [payloads(sequence) for _, sequence in received] == [
        expected_payloads(sample_of(index)) for index in range(8)
    ]


def test_entries_behind_the_point_read_to_are_found(stream, make_stream):
    """After a fail-over the clock of the new server may be behind, so new entries sort before old ones."""
    stream.add_samples([(0, sample_of(0))])
    settle_all(stream)
    with TokenFeed(make_stream(), length=3, end=(1, 0), timeout_s=90, probe_s=0.02) as feed:
        assert feed.next() is not None
        feed._last_id = b"99999999999999-0"
        stream.add_samples([(1, sample_of(1)), (2, sample_of(2))])
        settle_all(stream)
        assert [position.position for position, _ in feed] == [1, 2]


def test_workers_make_their_groups_again(stream):
    stream.add_samples([(index, sample_of(index)) for index in range(6)])
    held = [entry for service in SERVICES for entry in stream.read_work(service, "w", 2, 0)]
    for service in SERVICES:
        stream.client.xgroup_destroy(f"test:work:{service}", "tokenizers")
    for entry in held:
        stream.complete(entry, span_bytes(entry))
    settle_all(stream)
    assert stream.stats()["tokens"] == 6
    assert sum(stream.stats()["work"].values()) == 0


def test_a_blocked_worker_survives_the_loss_of_its_stream(stream, make_stream):
    got = []
    waiting = threading.Thread(target=lambda: got.extend(make_stream().read_work("text", "w", 1, 5000)))
    stream.read_work("text", "other", 1, 0)  # makes the group
    waiting.start()
    while not stream.client.info("clients")["blocked_clients"]:
        assert waiting.is_alive()
    stream.client.flushall()
    stream.add_samples([(2, sample_of(2))])
    waiting.join(20)
    assert len(got) == 1


def test_the_feed_waits_for_an_ingest_that_has_not_come(stream, make_stream):
    with TokenFeed(make_stream(), timeout_s=90, probe_s=0.02) as feed:
        assert stream.view().again_from is None
        with (
            ingesting(Ingest(make_stream(), Corpus(5), order=in_order)),
            workers(make_stream, features=False),
        ):
            assert feed.next()[0] == Position(0, 0)
    assert stream.view().again_from is None, "nothing was lost, so nothing was asked for"
