"""Adding, settling and assembling: exactly once, whatever is repeated."""

from __future__ import annotations

import pytest

from ernie5.protocol.errors import (
    InvalidInputError,
    InvalidMediaError,
    TokenizerMismatchError,
    UnavailableError,
)
from ernie5.protocol.samples import Sample, Segment
from ernie5.services.redis_client import connect
from ernie5.services.streams import (
    Completion,
    Failure,
    Position,
    RunKeys,
    TokenFeed,
    TokenStream,
    Tombstone,
    span_cache_key,
)
from tests.services.stream_helpers import (
    HASHES,
    ByteTokenizer,
    expected_payloads,
    payloads,
    sample_of,
    settle_all,
    span_bytes,
)


def read_all(stream: TokenStream, length: int, start=(0, 0), epochs: int = 1):
    with TokenFeed(stream, start, length=length, end=(epochs, 0), timeout_s=90) as feed:
        return list(feed)


def texts(*words: str) -> Sample:
    return Sample(segments=tuple(Segment(modality="text", text=word) for word in words))


def test_samples_come_out_as_they_went_in(stream):
    for position in range(20):
        stream.add_sample(0, position, sample_of(position), length=20)
    settle_all(stream)
    received = read_all(stream, 20)
    assert [position for position, _ in received] == [Position(0, index) for index in range(20)]
    for index, (_, sequence) in enumerate(received):
        sample = sample_of(index)
        assert payloads(sequence) == expected_payloads(sample)
        assert sequence.sample_id == sample.sample_id
        assert [segment.role for segment in sequence.segments] == [s.role for s in sample.segments]
        assert [segment.span.modality for segment in sequence.segments] == [
            s.modality for s in sample.segments
        ]
        assert sequence.metadata == {"index": index}


def test_a_sample_is_published_when_its_last_segment_comes(stream):
    stream.add_sample(0, 0, texts("one", "two", "three"), length=1)
    first, second, third = stream.read_work("text", "w", 10, 0)
    assert not stream.complete(third, span_bytes(third))
    assert not stream.complete(first, span_bytes(first))
    assert stream.stats()["tokens"] == 0
    assert stream.complete(second, span_bytes(second))
    assert stream.stats()["tokens"] == 1
    assert stream.stats()["work"]["text"] == 0


def test_completing_again_changes_nothing(stream):
    stream.add_sample(0, 0, texts("one", "two"), length=1)
    entries = stream.read_work("text", "w", 10, 0)
    for _ in range(3):
        stream.complete(entries[0], span_bytes(entries[0]))
    assert stream.stats()["tokens"] == 0, "one segment, three times, is not two segments"
    for _ in range(3):
        stream.complete(entries[1], span_bytes(entries[1]))
    assert stream.stats()["tokens"] == 1


def test_adding_again_changes_nothing(stream):
    for _ in range(3):
        stream.add_samples([(index, sample_of(index)) for index in range(6)])
    settle_all(stream)
    for _ in range(3):
        stream.add_samples([(index, sample_of(index)) for index in range(6)])
    stats = stream.stats()
    assert stats["tokens"] == stats["added"] == 6
    assert sum(stats["work"].values()) == 0


def test_a_late_result_about_other_media_is_not_taken(stream):
    stream.add_sample(0, 0, texts("old"), length=1)
    (stale,) = stream.read_work("text", "w", 1, 0)
    stream.client.delete("test:sample:0")  # as after a loss, when the position got another sample
    stream.add_sample(0, 0, texts("new"), length=1)
    assert not stream.complete(stale, span_bytes(stale))
    settle_all(stream)
    ((_, sequence),) = read_all(stream, 1)
    assert payloads(sequence) == (b"new",)


def test_media_seen_before_are_not_tokenised_again(stream):
    stream.add_samples([(index, sample_of(index)) for index in range(12)])
    settle_all(stream)
    added = stream.add_samples([(12 + index, sample_of(index)) for index in range(12)])
    assert added.new == added.published == 12
    assert added.cached_segments == sum(len(sample_of(index).segments) for index in range(12))
    assert sum(stream.stats()["work"].values()) == 0
    first, second = read_all(stream, 12), read_all(stream, 12, start=(1, 0), epochs=2)
    assert [sequence for _, sequence in first] == [sequence for _, sequence in second]


def test_role_is_not_part_of_the_cached_span(stream):
    stream.add_sample(0, 0, texts("word"), length=2)
    settle_all(stream)
    target = Sample(segments=(Segment(modality="text", text="word", role="target"),))
    assert stream.add_sample(0, 1, target, length=2).published == 1
    assert [sequence.segments[0].role for _, sequence in read_all(stream, 2)] == ["context", "target"]


def test_another_tokenizer_finds_nothing_in_the_cache(stream):
    stream.add_sample(0, 0, texts("word"), length=2)
    settle_all(stream)
    stream.register_tokenizer("text", "ff" * 16, "-", replace=True)
    other = TokenStream(stream.client, "test")
    assert other.add_sample(0, 1, texts("word"), length=2).published == 0


def test_mixing_tokenizers_in_a_run_is_refused(stream):
    with pytest.raises(TokenizerMismatchError, match="another name"):
        stream.register_tokenizer("text", "ff" * 16, "-")
    stream.register_tokenizer("text", HASHES["text"], "-")


def test_a_promised_span_that_was_evicted_is_asked_for(stream):
    stream.add_sample(0, 0, texts("word"), length=1)
    (entry,) = stream.read_work("text", "w", 1, 0)
    key = span_cache_key(entry.media_hash, HASHES["text"], "-", entry.ordinal)
    promise = Completion(entry, key, None)
    assert stream.complete_many([promise]) == (0, [promise])
    assert stream.stats()["work"]["text"] == 1, "the entry stays with its worker"
    assert stream.complete_many([Completion(entry, key, span_bytes(entry))]) == (1, [])


def test_an_evicted_hit_is_sent_with_its_payload(stream, monkeypatch):
    stream.add_sample(0, 0, texts("word"), length=2)
    settle_all(stream)
    cached = stream.cache.present

    def evicted_just_after(keys):
        found = cached(keys)
        for key in found:
            stream.client.delete(f"cache:{key}")
        return found

    monkeypatch.setattr(stream.cache, "present", evicted_just_after)
    assert stream.add_sample(0, 1, texts("word"), length=2).new == 1
    assert stream.stats()["work"]["text"] == 1


def test_the_cursor_must_be_the_expected_one(stream):
    assert stream.add_samples([(0, sample_of(0))], expected_cursor=-1, new_cursor=1).new == 1
    assert stream.add_samples([(1, sample_of(1))], expected_cursor=1, new_cursor=2).new == 1
    refused = stream.add_samples([(2, sample_of(2))], expected_cursor=1, new_cursor=3)
    assert refused.cursor == 2 and refused.new == 0
    assert stream.stats()["added"] == 2


def test_failed_attempts_end_as_dead_letter_and_tombstone(stream):
    stream.add_samples([(0, texts("fine")), (1, texts("cursed", "other")), (2, texts("good"))])
    seen = []
    while entries := stream.read_work("text", "w", 10, 0):
        for entry in entries:
            if entry.segment.text == "cursed":
                seen.append(entry.attempts)
                stream.fail(entry, RuntimeError("out of luck"))
            else:
                stream.complete(entry, span_bytes(entry))
    assert seen == [1, 2, 3]
    received = [value for _, value in read_all(stream, 3)]
    assert [type(value) for value in received if isinstance(value, Tombstone)] == [Tombstone]
    tomb = received[1]
    assert tomb.failure.type == "RuntimeError" and tomb.failure.message == "out of luck"
    assert (tomb.failure.attempts, tomb.failure.segment, tomb.failure.modality) == (3, 0, "text")
    (letter,) = stream.dead_letters()
    assert letter.ordinal == 1 and letter.failure == tomb.failure
    assert letter.sample_id == texts("cursed", "other").sample_id
    assert stream.stats()["tombstones"] == 1


def test_a_permanent_failure_buries_the_sample_at_once(stream):
    stream.add_sample(0, 0, texts("cursed", "other"), length=1)
    cursed, other = stream.read_work("text", "w", 10, 0)
    assert stream.fail(cursed, InvalidMediaError("no picture"), final=True)
    assert not stream.complete(other, span_bytes(other)), "its neighbour comes too late"
    ((_, tomb),) = read_all(stream, 1)
    assert tomb.failure.type == "invalid_media"
    assert not stream.fail(cursed, "again"), "a second burial changes nothing"
    assert stream.stats()["dead"] == 1


def test_what_cannot_be_written_becomes_a_tombstone(stream):
    broken = [
        Failure("OSError", "no such file"),
        Sample(segments=(Segment(modality="smell", data=b"x"),)),
        Sample(segments=(Segment(modality="image", reference="a.png"),)),
        Sample(segments=(Segment.model_construct(modality="text", role="context", text="\ud800", data=None,
                                                 reference=None, content_type=None, metadata={}),)),
        Sample(segments=(Segment(modality="text", text="x"),), metadata={"x": object()}),
        Sample(segments=(Segment(modality="text", text="x", metadata={"x": object()}),)),
    ]  # fmt: skip
    stream.add_samples(list(enumerate(broken)))
    received = [value for _, value in read_all(stream, len(broken))]
    assert all(isinstance(value, Tombstone) for value in received)
    reasons = [value.failure.message for value in received]
    for reason, part in zip(
        reasons, ["no such file", "smell", "a.png", "Unicode", "JSON", "JSON"], strict=True
    ):
        assert part in reason
    assert stream.stats()["dead"] == len(broken)


def test_released_entries_count_no_attempt(stream):
    stream.add_sample(0, 0, texts("word"), length=1)
    for _ in range(5):
        (entry,) = stream.read_work("text", "w", 1, 0)
        assert entry.attempts == 1
        stream.release([entry])
    settle_all(stream)
    assert payloads(read_all(stream, 1)[0][1]) == (b"word",)


def test_a_damaged_entry_is_reported_not_raised(stream):
    stream.add_sample(0, 0, texts("word"), length=1)
    ((entry_id, fields),) = stream.client.xrange("test:work:text")
    stream.client.xdel("test:work:text", entry_id)
    stream.client.xadd("test:work:text", {**fields, b"b": b"\0\1\2"})
    (entry,) = stream.read_work("text", "w", 1, 0)
    assert entry.segment is None and entry.error is not None


def test_position_trims_what_a_checkpoint_covers(stream):
    stream.add_samples([(index, sample_of(index)) for index in range(10)])
    settle_all(stream)
    with TokenFeed(stream, length=10, end=(1, 0), timeout_s=90) as feed:
        for _ in range(6):
            feed.next()
        with pytest.raises(InvalidInputError, match="can't cover"):
            feed.commit((0, 7))
        feed.commit((0, 4))
    stats = stream.stats()
    assert (stats["consumed"], stats["covered"], stats["untrimmed"], stats["tokens"]) == (6, 4, 6, 6)
    assert stream.add_samples([(2, sample_of(2))]).new == 0, "what is covered does not come back"


def test_two_runs_share_the_cache_and_nothing_else(stream):
    stream.add_sample(0, 0, texts("word"), length=1)
    settle_all(stream)
    other = TokenStream(stream.client, "other")
    for modality in ByteTokenizer("text").modalities:
        other.register_tokenizer(modality, HASHES["text"], "-")
    assert other.add_sample(0, 0, texts("word"), length=1).published == 1
    assert other.delete_run() > 0
    assert stream.stats()["tokens"] == 1


def test_names_are_checked():
    for name in ("", "a b", "x:y", "*", "a" * 65):
        with pytest.raises(InvalidInputError):
            RunKeys(name)
    with pytest.raises(InvalidInputError, match="known: text"):
        RunKeys("demo").work("smell")
    with pytest.raises(InvalidInputError):
        Position(0, 5).ordinal(5)


def test_another_corpus_in_the_same_run_is_refused(stream):
    stream.register_corpus(10, 1, "mini")
    stream.register_corpus(10, 1, "mini")
    with pytest.raises(InvalidInputError, match="another run name"):
        stream.register_corpus(11, 1, "mini")


def test_a_server_that_is_not_there_is_unavailable():
    with pytest.raises(UnavailableError, match="can't be reached"):
        connect("redis://127.0.0.1:1/0", retries=0)
