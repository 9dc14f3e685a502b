"""Ingest: order, back-pressure that can't deadlock, unreadable samples, references."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ernie5.corpora.order import position_to_index
from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.protocol.samples import Sample, Segment
from ernie5.services import ingest as ingest_module
from ernie5.services.ingest import Ingest, resolve_references
from ernie5.services.streams import Position, TokenFeed, Tombstone
from ernie5.services.trainer_feed import TrainerFeed
from tests.services.stream_helpers import (
    Corpus,
    expected_payloads,
    in_order,
    ingesting,
    payloads,
    sample_of,
    settle_all,
    wait_for,
    workers,
)


def test_the_corpus_is_walked_in_its_order(stream, make_stream):
    ingest = Ingest(stream, Corpus(30), seed=5, epochs=3)
    with (
        TokenFeed(make_stream(), end=(3, 0), timeout_s=90) as feed,
        ingesting(ingest),
        workers(make_stream, features=False),
    ):
        received = list(feed)
    for position, sequence in received:
        index = position_to_index(5, position.epoch, position.position, 30)
        assert payloads(sequence) == expected_payloads(sample_of(index))
    assert [position for position, _ in received] == [Position.of(ordinal, 30) for ordinal in range(90)]
    orders = [[s.metadata["index"] for p, s in received if p.epoch == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert all(sorted(order) == list(range(30)) for order in orders)


def test_ingest_ends_when_all_is_consumed(stream, make_stream):
    ingest = Ingest(stream, Corpus(10), epochs=2)
    thread = threading.Thread(target=ingest.run, args=(threading.Event(),))
    with TokenFeed(make_stream(), end=(2, 0), timeout_s=90) as feed, workers(make_stream, features=False):
        thread.start()
        assert len(list(feed)) == 20
        thread.join(90)
    assert not thread.is_alive()
    assert ingest.metrics.added == 20


def test_producers_wait_above_the_high_water_mark(stream):
    ingest = Ingest(stream, Corpus(100), high_water=16, entry_mark=64, batch_size=5, order=in_order)
    with ingesting(ingest):
        wait_for(lambda: ingest.metrics.waits >= 3)
        assert stream.view().lag == 16
        settle_all(stream)
        with TokenFeed(stream, timeout_s=90) as feed:
            for _ in range(10):
                feed.next()
            wait_for(lambda: stream.view().cursor == 26)
            waits = ingest.metrics.waits
            wait_for(lambda: ingest.metrics.waits >= waits + 3)
            assert stream.view().lag == 16


def test_untrimmed_entries_force_a_checkpoint_and_never_a_deadlock(stream, make_stream):
    """A trainer that checkpoints only when asked, and only between steps of ten samples, gets through."""
    ingest = Ingest(stream, Corpus(50), epochs=4, high_water=8, entry_mark=24, batch_size=4)
    most, asked = 0, 0
    with (
        TrainerFeed(make_stream(), end=(4, 0), timeout_s=90, prefetch=4) as feed,
        ingesting(ingest),
        workers(make_stream, features=False),
    ):
        for number, _ in enumerate(feed, start=1):
            most = max(most, stream.view().untrimmed)
            if number % 10 == 0 and feed.checkpoint_asked:
                asked += 1
                feed.commit(feed.state())
    assert feed.delivered == 200
    assert asked >= 2
    # The mark, one batch on top of it, and what the floor lets through until the trainer's next step.
    assert most <= 24 + 4 + 12


def test_a_trainer_that_never_checkpoints_is_not_starved(stream, make_stream):
    ingest = Ingest(stream, Corpus(60), epochs=1, high_water=8, entry_mark=10, batch_size=4)
    with (
        TokenFeed(make_stream(), end=(1, 0), timeout_s=90, prefetch=2) as feed,
        ingesting(ingest),
        workers(make_stream, features=False),
    ):
        assert len(list(feed)) == 60


def test_the_feed_tells_that_a_checkpoint_is_asked_for(stream, make_stream):
    asked = threading.Event()
    with TokenFeed(make_stream(), length=10, on_checkpoint_asked=asked.set, timeout_s=90) as feed:
        stream.ask_checkpoint()
        assert asked.wait(90)
        assert feed.checkpoint_asked
        stream.add_sample(0, 0, sample_of(0), length=10)
        settle_all(stream)
        feed.next()
        feed.commit(feed.position)
        assert not feed.checkpoint_asked
        wait_for(lambda: not stream.view().checkpoint_asked)


def test_a_full_server_makes_producers_wait_and_empties_again(server, stream, make_stream):
    """With little memory the run goes on: what was consumed and is cached makes room."""

    class Big:
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Sample:
            return Sample(segments=(Segment(modality="image", data=bytes([index]) * 60_000),))

    memory = stream.client.info("memory")["used_memory"]
    stream.client.config_set("maxmemory", memory + (6 << 20))
    try:
        ingest = Ingest(stream, Big(), epochs=2, high_water=40, entry_mark=100, batch_size=4)
        with (
            TokenFeed(make_stream(), end=(2, 0), timeout_s=90, prefetch=4, decoded_cache_bytes=0) as feed,
            ingesting(ingest),
            workers(make_stream, ["vision"], features=False),
        ):
            received = list(feed)
    finally:
        stream.client.config_set("maxmemory", 768 << 20)
    assert len(received) == 120
    assert all(not isinstance(value, Tombstone) for _, value in received)
    assert stream.stats()["evicted"] > 0


def test_unreadable_samples_become_tombstones_and_the_run_goes_on(stream, make_stream):
    ingest = Ingest(stream, Corpus(20, broken=[3, 7]), epochs=2, order=in_order)
    with (
        TrainerFeed(make_stream(), end=(2, 0), timeout_s=90) as feed,
        ingesting(ingest),
        workers(make_stream, features=False),
    ):
        sequences = list(feed)
    wanted = [index for index in range(20) if index not in (3, 7)] * 2
    assert [sequence.metadata["index"] for sequence in sequences] == wanted
    assert feed.tombstones == {"OSError": 4}
    assert ingest.metrics.unreadable == 4
    assert "item 7 can't be read" in stream.dead_letters(1)[0].failure.message
    assert stream.dead_letters(1)[0].failure.attempts == 3


def test_ingest_goes_to_the_trainer_however_far_it_is(stream, make_stream):
    ingest = Ingest(stream, Corpus(100), order=in_order, high_water=8, entry_mark=40)
    with ingesting(ingest), workers(make_stream, features=False):
        wait_for(lambda: stream.view().cursor == 8)
        for start in (50, 20, 90):  # forward, back, and forward again
            with TokenFeed(make_stream(), (0, start), timeout_s=90, probe_s=0.02) as feed:
                received = [feed.next() for _ in range(10)]
            assert [position.position for position, _ in received] == list(range(start, start + 10))
            assert [value.metadata["index"] for _, value in received] == list(range(start, start + 10))


def test_two_ingests_share_the_walk(stream, make_stream):
    first, second = (Ingest(make_stream(), Corpus(50), epochs=2, batch_size=3) for _ in range(2))
    with (
        TokenFeed(make_stream(), end=(2, 0), timeout_s=90) as feed,
        ingesting(first),
        ingesting(second),
        workers(make_stream, features=False),
    ):
        assert len(list(feed)) == 100
    assert first.metrics.added + second.metrics.added == 100


def test_another_seed_in_the_same_run_is_refused(stream):
    stream.register_corpus(5, 1)
    with pytest.raises(InvalidInputError, match="another run name"):
        Ingest(stream, Corpus(5), seed=2).run(threading.Event())


def test_marks_are_checked(stream):
    with pytest.raises(InvalidInputError, match="above high_water"):
        Ingest(stream, Corpus(5), high_water=10, entry_mark=10)
    with pytest.raises(InvalidInputError, match="empty"):
        Ingest(stream, Corpus(0))
    with pytest.raises(InvalidInputError, match="epochs 0"):
        Ingest(stream, Corpus(5), epochs=0)


def test_references_are_read_inside_the_corpus_only(tmp_path: Path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "corpus" / "a.png").write_bytes(b"pixels")
    (tmp_path / "corpus" / "a.txt").write_text("grüß", encoding="utf-8")
    (tmp_path / "corpus" / "bad.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "corpus" / "link.png").symlink_to(tmp_path / "secret.png")

    def read(reference: str, modality: str = "image") -> Segment:
        segment = Segment(modality=modality, reference=reference, content_type="image/png", role="target")
        sample = Sample(segments=(segment,), metadata={"a": 1})
        resolved = resolve_references(sample, tmp_path / "corpus")
        assert resolved.metadata == {"a": 1}
        return resolved.segments[0]

    picture = read("a.png")
    assert (picture.data, picture.role, picture.content_type) == (b"pixels", "target", "image/png")
    assert read("a.txt", "text").text == "grüß"
    for outside in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        with pytest.raises(InvalidInputError, match="leads out"):
            read(outside)
    with pytest.raises(InvalidMediaError, match="not UTF-8"):
        read("bad.txt", "text")
    with pytest.raises(FileNotFoundError):
        read("missing.png")
    monkeypatch.setattr(ingest_module, "MAX_MEDIUM_BYTES", 3)
    with pytest.raises(MediaTooLargeError, match="6 bytes"):
        read("a.png")
