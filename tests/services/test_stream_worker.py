"""The drain loop: batches, bad media, killed and stopped workers, a Redis that goes away."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError, UnavailableError
from ernie5.protocol.samples import Sample, Segment
from ernie5.services.child_process import start_child
from ernie5.services.streams import TokenFeed, Tombstone
from ernie5.services.worker import drain
from tests.services.stream_helpers import (
    HASHES,
    ByteTokenizer,
    expected_payloads,
    payloads,
    sample_of,
    settle_all,
    wait_for,
    workers,
)

WORKER = Path(__file__).with_name("worker_process.py")


def texts(*words: str) -> Sample:
    return Sample(segments=tuple(Segment(modality="text", text=word) for word in words))


def read_all(stream, length: int):
    with TokenFeed(stream, length=length, end=(1, 0), timeout_s=90) as feed:
        return [value for _, value in feed]


def start_worker(server, marker: Path, service: str = "text") -> subprocess.Popen[bytes]:
    return start_child([sys.executable, str(WORKER), server.url, "test", service, str(marker)])


def test_batches_are_drained_and_repetitions_tokenised_once(stream, make_stream):
    words = [f"word {index % 10}" for index in range(100)]
    stream.add_samples([(index, texts(word)) for index, word in enumerate(words)])
    totals = []
    with workers(make_stream, ["text"], on_metrics=totals.append, features=False) as tokenizers:
        received = read_all(stream, 100)
    assert [payloads(value) for value in received] == [(word.encode(),) for word in words]
    assert sum(tokenizers["text"].calls) == 10
    assert (totals[-1].entries, totals[-1].encoded, totals[-1].reused, totals[-1].published) == (
        100,
        10,
        90,
        100,
    )


def test_a_bad_medium_is_tried_in_place_and_buried_with_its_reason(stream, make_stream):
    stream.add_samples([(0, texts("good")), (1, texts("bad", "good")), (2, texts("fine"))])
    with workers(make_stream, ["text"], features=False) as tokenizers:
        received = read_all(stream, 3)
    assert isinstance(received[1], Tombstone)
    assert received[1].failure.type == "invalid_media"
    assert received[1].failure.attempts == 3
    assert tokenizers["text"].calls.count(1) >= 2, "it was tried again alone"
    assert [payloads(received[index]) for index in (0, 2)] == [(b"good",), (b"fine",)]


def test_a_batch_that_raises_is_blamed_on_the_one_at_fault(stream, make_stream):
    class Fragile(ByteTokenizer):
        def encode_segments(self, segments, **options):
            if any(segment.payload == b"explosive" for segment in segments):
                raise MemoryError("boom")
            return super().encode_segments(segments, **options)

    stream.add_samples([(index, texts(f"word {index}")) for index in range(7)] + [(7, texts("explosive"))])
    stop = threading.Event()
    thread = threading.Thread(
        target=drain,
        args=(Fragile("text"), make_stream(), stop, 8),
        kwargs={"features": False, "block_ms": 20},
    )
    thread.start()
    try:
        received = read_all(stream, 8)
    finally:
        stop.set()
        thread.join()
    assert [payloads(value) for value in received[:7]] == [(b"word %d" % index,) for index in range(7)]
    assert received[7].failure.type == "MemoryError" and received[7].failure.attempts == 3
    assert stream.stats()["retries"] == 2


def test_an_unavailable_tokenizer_is_tried_again_elsewhere(stream, make_stream):
    class Busy(ByteTokenizer):
        tries = 0

        def encode_segments(self, segments, **options):
            Busy.tries += 1
            if Busy.tries == 1:
                return [UnavailableError("the device is busy") for _ in segments]
            return super().encode_segments(segments, **options)

    stream.add_samples([(0, texts("a")), (1, texts("b"))])
    stop = threading.Event()
    thread = threading.Thread(
        target=drain, args=(Busy("text"), make_stream(), stop, 8), kwargs={"features": False, "block_ms": 20}
    )
    thread.start()
    try:
        assert [payloads(value) for value in read_all(stream, 2)] == [(b"a",), (b"b",)]
    finally:
        stop.set()
        thread.join()


def test_killing_a_worker_in_the_middle_of_a_batch_loses_nothing(server, stream, make_stream, tmp_path):
    stream.add_samples([(index, texts(f"word {index}")) for index in range(12)] + [(12, texts("stuck"))])
    victim = start_worker(server, tmp_path / "marker")
    wait_for((tmp_path / "marker").exists, "the worker's first batch")
    (tmp_path / "marker.freed").touch()
    victim.kill()
    victim.wait()
    assert stream.stats()["pending"]["text"] > 0
    with workers(make_stream, ["text"], features=False):
        received = read_all(stream, 13)
    assert [payloads(value)[0] for value in received] == [b"word %d" % i for i in range(12)] + [b"stuck"]


def test_media_that_kill_workers_are_buried_and_take_nobody_along(server, stream, tmp_path):
    stream.add_samples([(index, texts(f"word {index}")) for index in range(8)] + [(8, texts("poison"))])
    deaths = 0
    with TokenFeed(stream, length=9, end=(1, 0), timeout_s=90) as feed:
        received = []

        def collect() -> None:
            received.extend(value for _, value in feed)

        reader = threading.Thread(target=collect)
        reader.start()
        while reader.is_alive():
            worker = start_worker(server, tmp_path / f"marker{deaths}")
            wait_for(lambda worker=worker: worker.poll() is not None or not reader.is_alive())
            if worker.poll() is None:
                worker.terminate()
            worker.wait()
            deaths += worker.returncode == -9
            assert deaths <= 4
    assert deaths == 3
    assert [payloads(value)[0] for value in received[:8]] == [b"word %d" % index for index in range(8)]
    assert received[8].failure.type == "worker_lost"


def test_a_slow_batch_is_not_taken_for_a_dead_worker(stream, make_stream):
    class Slow(ByteTokenizer):
        go_on = threading.Event()

        def encode_segments(self, segments, **options):
            assert Slow.go_on.wait(30)
            return super().encode_segments(segments, **options)

    stream.add_sample(0, 0, texts("word"), length=1)
    stop = threading.Event()
    thread = threading.Thread(
        target=drain, args=(Slow("text"), make_stream(), stop, 8), kwargs={"features": False, "block_ms": 20}
    )
    thread.start()
    try:
        wait_for(lambda: stream.stats()["pending"]["text"] == 1)
        ticks = []

        def nobody_claims_it() -> bool:
            # `stream` would claim after 50 ms of silence; make_stream's lease renews after 200/3 ms.
            other = make_stream()
            ticks.append(other.read_work("text", "thief", 1, 20))
            return len(ticks) >= 30

        wait_for(nobody_claims_it)
        assert not any(ticks)
        Slow.go_on.set()
        assert payloads(read_all(stream, 1)[0]) == (b"word",)
    finally:
        Slow.go_on.set()
        stop.set()
        thread.join()


def test_a_stopped_worker_leaves_nothing_pending(stream, make_stream):
    stream.add_samples([(index, sample_of(index)) for index in range(40)])
    with workers(make_stream, features=False):
        wait_for(lambda: stream.stats()["completed"] >= 5)
    stats = stream.stats()
    assert sum(stats["pending"].values()) == 0
    assert sum(stats["consumers"].values()) == 0
    settle_all(stream)
    assert [payloads(value) for value in read_all(stream, 40)] == [
        expected_payloads(sample_of(index)) for index in range(40)
    ]


def test_a_worker_with_another_tokenizer_is_refused_unless_it_takes_over(stream, make_stream):
    class Newer(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__("text")
            self.hash = "0d" * 16

    stop = threading.Event()
    with pytest.raises(TokenizerMismatchError):
        drain(Newer(), make_stream(), stop, features=False)
    stop.set()
    drain(Newer(), make_stream(), stop, features=False, replace_tokenizer=True)
    assert stream.tokenizers()["text"] == f"{HASHES['text']}:-", "a stopped loop takes nothing over"
    stop.clear()
    options = {"features": False, "replace_tokenizer": True, "block_ms": 20}
    thread = threading.Thread(target=drain, args=(Newer(), make_stream(), stop), kwargs=options)
    thread.start()
    try:
        wait_for(lambda: stream.tokenizers()["text"] == f"{'0d' * 16}:-", "the takeover")
    finally:
        stop.set()
        thread.join()


def test_a_worker_serves_one_service(make_stream):
    class Mixed(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__("text")
            self.modalities = ("text", "image")

    with pytest.raises(InvalidInputError, match="belong to 2"):
        drain(Mixed(), make_stream(), threading.Event())
