"""A byte-wise tokenizer, samples and conditions for the tests of the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ernie5.protocol.errors import ErnieMultiError, InvalidMediaError
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.samples import Sample, Segment
from ernie5.protocol.tokens import CodebooksLayout, ScalesLayout, SequenceLayout, TokenSpan
from ernie5.protocol.wire import encode_span
from ernie5.services.ingest import Ingest
from ernie5.services.streams import TokenStream, WorkEntry
from ernie5.services.worker import DrainMetrics, drain

HASHES = {"text": "a1" * 16, "vision": "b2" * 16, "audio": "c3" * 16}
SERVICES = ("text", "vision", "audio")


class ByteTokenizer:
    """Codes are the payload's bytes, in each layout; the payload ``bad`` can't be tokenised."""

    def __init__(self, service: str) -> None:
        self.hash = HASHES[service]
        self.modalities = {"text": ("text", "code"), "vision": ("image",), "audio": ("speech", "sound")}[
            service
        ]
        self.calls: list[int] = []

    def encode_segments(
        self, segments: Sequence[Segment], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        self.calls.append(len(segments))
        return [self._encode(segment) for segment in segments]

    def _encode(self, segment: Segment) -> TokenSpan | ErnieMultiError:
        data = np.frombuffer(segment.payload, np.uint8)
        if segment.payload == b"bad":
            return InvalidMediaError("this medium is bad")
        layout = modality_of(segment.modality).layout
        if layout == "sequence":
            return TokenSpan(segment.modality, SequenceLayout(256), data.astype(np.int32), self.hash)
        if layout == "scales":
            schedule = ((1, 1),) if len(data) == 1 else ((1, 1), (1, len(data) - 1))
            return TokenSpan(segment.modality, ScalesLayout(8, schedule), data.astype(np.uint32), self.hash)
        codes = data.astype(np.int16)[:, None]
        return TokenSpan(
            segment.modality, CodebooksLayout(256, 1, 12.5, 16000.0, len(data) * 1280), codes, self.hash
        )


def span_bytes(entry: WorkEntry) -> bytes:
    """The encoded span of an entry, as a worker of its service makes it."""
    assert entry.segment is not None
    (span,) = ByteTokenizer(entry.service).encode_segments([entry.segment])
    assert isinstance(span, TokenSpan)
    return encode_span(span)


def sample_of(index: int) -> Sample:
    """A sample of one to three segments of mixed modalities, many of them shared between samples."""
    segments = [Segment(modality="text", text=f"question {index % 5}")]
    if index % 2:
        segments.append(Segment(modality="image", data=b"picture %d" % index))
    if index % 3 == 0:
        segments.append(Segment(modality="speech", data=b"sound %d" % (index % 11)))
    segments.append(Segment(modality="text", role="target", text=f"answer {index}"))
    return Sample(segments=tuple(segments), metadata={"index": index})


class Corpus:
    """``length`` samples of :func:`sample_of`."""

    def __init__(self, length: int, broken: Iterable[int] = ()) -> None:
        self.length = length
        self.broken = set(broken)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index in self.broken:
            raise OSError(f"item {index} can't be read")
        if not 0 <= index < self.length:
            raise IndexError(index)
        return sample_of(index)


def payloads(sequence) -> tuple[bytes, ...]:
    """What a sequence of byte-wise tokens says, to compare with its sample."""
    return tuple(segment.span.codes.astype(np.uint8).tobytes() for segment in sequence.segments)


def expected_payloads(sample: Sample) -> tuple[bytes, ...]:
    return tuple(segment.payload for segment in sample.segments)


def settle_all(stream: TokenStream, consumer: str = "w") -> int:
    """Complete whatever waits in the work streams; the number of entries."""
    done = 0
    for service in SERVICES:
        while entries := stream.read_work(service, consumer, 64, 0):
            for entry in entries:
                stream.complete(entry, span_bytes(entry))
                done += 1
    return done


def wait_for(condition: Callable[[], object], what: str = "the condition", deadline_s: float = 90.0) -> None:
    """Poll until ``condition()`` holds; fails after the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {deadline_s} s"
        time.sleep(0.005)


@contextmanager
def workers(
    make_stream: Callable[[], TokenStream], services: Sequence[str] = SERVICES, **options
) -> Iterator[dict[str, ByteTokenizer]]:
    """A drain loop in a thread for each service; their errors fail the test."""
    stop = threading.Event()
    errors: list[BaseException] = []
    tokenizers = {service: ByteTokenizer(service) for service in services}

    def work(service: str) -> DrainMetrics | None:
        try:
            return drain(tokenizers[service], make_stream(), stop, 8, block_ms=20, **options)
        except BaseException as error:
            errors.append(error)
            return None

    threads = [threading.Thread(target=work, args=(service,)) for service in services]
    for thread in threads:
        thread.start()
    try:
        yield tokenizers
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)
    assert not errors, errors


@contextmanager
def ingesting(ingest: Ingest) -> Iterator[Ingest]:
    """An ingest in a thread; its errors fail the test."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ingest.run(stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ingest
    finally:
        stop.set()
        thread.join(90)
    assert not errors, errors


def in_order(seed: int, epoch: int, position: int, length: int) -> int:
    """The simplest order."""
    return position
