"""Tokens of the elastic benchmark: real digits to read, spoken digits to hear, prose and code to continue.

Digits and sounds are the mini corpus's, its held-out part the test. It has little text, so the text is that
of the mini corpus and, for the most part, the source of Python's standard library, cut into windows: there is
enough of it for no window to come twice, and whole modules are held out.
"""

from __future__ import annotations

import hashlib
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ernie5.corpora.corpus import Corpus, open_corpus
from ernie5.corpora.order import position_to_index
from ernie5.protocol.errors import ErnieMultiError
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.wire import decode_sequence, encode_sequence
from ernie5.services.tokenizer_service import load_tokenizer
from ernie5.tokenizers.base import Tokenizer

DIGITS, CAPTIONS, TEXT = "digits", "captions", "text"
_WINDOW = 128
_TRAINED_WINDOWS, _TEST_WINDOWS = 8000, 240
_CALIBRATION = {DIGITS: 200, CAPTIONS: 150, TEXT: 24}
# How often a step's stream holds each sample for every time that it holds a window of text.
_PASSES = {DIGITS: 18, CAPTIONS: 18, TEXT: 1}
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "lib2to3", "encodings", "pydoc_data"}


@dataclass
class Data:
    """Samples by task: what trains, what chooses layers and experts, and what judges; all disjoint."""

    train: dict[str, list[TokenSequence]]
    calibration: dict[str, list[TokenSequence]]
    test: dict[str, list[TokenSequence]]
    tokenizers: dict[str, str]

    def stream(self, seed: int, start: int = 0) -> Iterator[tuple[int, TokenSequence]]:
        """Endless (position, sample) from ``start``, a function of the seed: every arm sees the same."""
        samples = [
            sample for task, passes in _PASSES.items() for sample in self.train[task] for _ in range(passes)
        ]
        position = start
        while True:
            epoch, place = divmod(position, len(samples))
            yield position, samples[position_to_index(seed, epoch, place, len(samples))]
            position += 1

    def mixed(self, part: dict[str, list[TokenSequence]], seed: int = 0) -> list[TokenSequence]:
        """The samples of all tasks in random order."""
        samples = [sample for task in (DIGITS, CAPTIONS, TEXT) for sample in part[task]]
        return [samples[index] for index in np.random.default_rng(seed).permutation(len(samples))]


def load_data(folder: Path) -> Data:
    """Tokenise, or read the tokens of an earlier run from ``folder``.

    Raises:
        ErnieMultiError: an item that can't be tokenised.
    """
    tokenizers = {service: load_tokenizer(service) for service in ("text", "vision", "audio")}
    hashes = {service: tokenizer.hash for service, tokenizer in tokenizers.items()}
    version = hashlib.sha256(
        "|".join([*hashes.values(), sysconfig.get_python_version(), *map(str, _sizes())]).encode()
    ).hexdigest()[:12]
    parts: list[dict[str, list[TokenSequence]]] = []
    for name in ("train", "calibration", "test"):
        path = folder / f"tokens-{version}-{name}.bin"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            print("  tokenising", flush=True)
            for part, samples in zip(("train", "calibration", "test"), _tokenise(tokenizers)):
                _write(folder / f"tokens-{version}-{part}.bin", samples)
        parts.append(_read(path))
    train, calibration, test = parts
    return Data(train, calibration, test, hashes)


def _sizes() -> tuple[object, ...]:
    return _WINDOW, _TRAINED_WINDOWS, _TEST_WINDOWS, sorted(_CALIBRATION.items())


def _tokenise(tokenizers: dict[str, Tokenizer]) -> list[dict[str, list[TokenSequence]]]:
    train, test = open_corpus("mini"), open_corpus("mini", "test")
    windows, held_out = _windows(tokenizers["text"])
    parts: list[dict[str, list[TokenSequence]]] = [{}, {}, {}]
    for task, corpus_task in ((DIGITS, "digit_read"), (CAPTIONS, "speech_hear"), (TEXT, "text")):
        known = _encoded(train, corpus_task, tokenizers)
        asked = _encoded(test, corpus_task, tokenizers)
        if task == CAPTIONS:  # names of things are heard too, but few: words of digits are what is asked
            asked = [sample for sample in asked if sample.metadata.get("digit") is not None]
        if task == TEXT:
            known, asked = known + windows, asked + held_out
        order = np.random.default_rng(0).permutation(len(known))
        apart = set(order[: _CALIBRATION[task]].tolist())
        parts[0][task] = [sample for index, sample in enumerate(known) if index not in apart]
        parts[1][task] = [known[index] for index in sorted(apart)]
        parts[2][task] = asked
    return parts


def _encoded(corpus: Corpus, task: str, tokenizers: dict[str, Tokenizer]) -> list[TokenSequence]:
    samples = [corpus[index] for index in corpus.indices(task)]
    parts: list[list[TokenSegment]] = [[] for _ in samples]
    for number in range(max(len(sample.segments) for sample in samples)):
        having = [index for index, sample in enumerate(samples) if number < len(sample.segments)]
        segments = [samples[index].segments[number] for index in having]
        for index, span in zip(having, _spans(segments, tokenizers)):
            parts[index].append(TokenSegment(span, samples[index].segments[number].role))
    return [
        TokenSequence(sample.sample_id, tuple(part), dict(sample.metadata))
        for sample, part in zip(samples, parts)
    ]


def _spans(segments: Sequence[Segment], tokenizers: dict[str, Tokenizer]) -> Iterator[TokenSpan]:
    for start in range(0, len(segments), 100):
        some = segments[start : start + 100]
        tokenizer = tokenizers[modality_of(some[0].modality).service]
        for span in tokenizer.encode_segments(some, features=True):
            if isinstance(span, ErnieMultiError):
                raise span
            yield span


def _windows(tokenizer: Tokenizer) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Windows of the standard library's source: some of most modules, and of modules that are held out."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path for path in library.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(library).parts)
    )
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    texts = [text for text in texts if len(text) > 1000]
    segments = [Segment(modality="code", text=text, role="target") for text in texts]
    trained: list[TokenSequence] = []
    held_out: list[TokenSequence] = []
    for number, span in enumerate(_spans(segments, {"text": tokenizer})):
        codes = span.codes
        cut = [
            TokenSequence(
                f"{number}-{start}",
                (
                    TokenSegment(
                        TokenSpan(span.modality, span.layout, codes[start : start + _WINDOW], span.tokenizer),
                        "target",
                    ),
                ),
                {"task": "text"},
            )
            for start in range(0, len(codes) - _WINDOW + 1, _WINDOW)
        ]
        (held_out if number % 10 == 0 else trained).extend(cut)
    generator = np.random.default_rng(0)
    return (
        [trained[index] for index in generator.permutation(len(trained))[:_TRAINED_WINDOWS]],
        [held_out[index] for index in generator.permutation(len(held_out))[:_TEST_WINDOWS]],
    )


def _write(path: Path, samples: dict[str, list[TokenSequence]]) -> None:
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        for task, some in samples.items():
            for sample in some:
                data = encode_sequence(TokenSequence(sample.sample_id, sample.segments, {"task": task}))
                file.write(struct.pack("<I", len(data)) + data)
    temporary.rename(path)


def _read(path: Path) -> dict[str, list[TokenSequence]]:
    data, samples, at = path.read_bytes(), {DIGITS: [], CAPTIONS: [], TEXT: []}, 0  # type: ignore[var-annotated]
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        sample = decode_sequence(data[at + 4 : at + 4 + size])
        samples[str(sample.metadata["task"])].append(sample)
        at += 4 + size
    return samples
