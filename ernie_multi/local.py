"""A trained model and its tokenizers in this process: questions in, answers out, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ernie5.backbone.inference.engine import InferenceEngine
from ernie5.backbone.inference.offload import load_offloaded
from ernie5.backbone.training.checkpoint import load_model
from ernie5.protocol.errors import ErnieMultiError, TokenizerMismatchError
from ernie5.protocol.generation import (
    DoneEvent,
    ErrorEvent,
    FinishReason,
    GenerationParams,
    Request,
    SpanEvent,
    TokenEvent,
    Usage,
)
from ernie5.protocol.modalities import modality_of
from ernie5.protocol.samples import Sample, Segment
from ernie5.protocol.tokens import TokenSegment, TokenSequence, TokenSpan
from ernie5.services.tokenizer_service import TOKENIZERS, load_tokenizer
from ernie5.tokenizers.base import Medium, Tokenizer
from ernie5.tokenizers.modalities import with_modalities
from ernie5.tokenizers.text.tokenizer import TextTokenizer


@dataclass
class Answer:
    """What the model said: text, and generated media as spans in order."""

    text: str = ""
    spans: list[TokenSpan] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    usage: Usage = field(default_factory=Usage)


class LocalModel:
    """A model folder with the tokenizers it was trained with.

    Args:
        expert_memory: bytes of expert weights to hold in memory, the others stay in the file; None holds all.

    Raises:
        InvalidInputError: there is no model in ``folder``, or the memory holds no expert.
        TokenizerMismatchError: the installed tokenizers are not those of its training.
    """

    def __init__(
        self,
        folder: Path,
        *,
        capacity: int = 16,
        max_length: int = 1024,
        expert_memory: int | None = None,
    ) -> None:
        self.folder = folder
        self.model, self.hashes = (
            load_model(folder) if expert_memory is None else load_offloaded(folder, expert_memory)
        )
        self.engine = InferenceEngine(self.model, self.hashes, capacity=capacity, max_length=max_length)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._media: dict[str, Tokenizer] = {}

    @cached_property
    def text(self) -> TextTokenizer:
        tokenizer = self.tokenizer("text")
        assert isinstance(tokenizer, TextTokenizer)
        return tokenizer

    def media(self, service: str) -> Tokenizer:
        """The tokenizer of a service with all modalities that build on it."""
        if service not in self._media:
            self._media[service] = with_modalities(service, self.tokenizer(service))
        return self._media[service]

    def tokenizer(self, service: str) -> Tokenizer:
        """The tokenizer of a service, loaded on first use."""
        if service not in self._tokenizers:
            own = self.folder / "text.model"  # an imported network keeps its own text tokenizer
            foreign = service == "text" and own.is_file()
            tokenizer = TextTokenizer.load(own) if foreign else load_tokenizer(service)
            expected = self.hashes.get(service)
            if expected is not None and tokenizer.hash != expected:
                raise TokenizerMismatchError(
                    f"the model in {self.folder} was trained with {service} tokenizer {expected[:12]}, "
                    f"installed is {tokenizer.hash[:12]}; train it again, or install that version"
                )
            self._tokenizers[service] = tokenizer
        assert service in TOKENIZERS
        return self._tokenizers[service]

    def encode(self, segments: Sequence[Segment], *, features: bool = True) -> list[TokenSpan]:
        """Spans of segments, in order.

        Raises:
            ErnieMultiError: the first segment that can't be tokenised.
        """
        spans: list[TokenSpan | None] = [None] * len(segments)
        by_service: dict[str, list[int]] = {}
        for index, segment in enumerate(segments):
            by_service.setdefault(modality_of(segment.modality).service, []).append(index)
        for service, indices in by_service.items():
            chosen = [segments[index] for index in indices]
            for index, result in zip(indices, self.media(service).encode_segments(chosen, features=features)):
                if isinstance(result, ErnieMultiError):
                    raise result
                spans[index] = result
        return [span for span in spans if span is not None]

    def decode(self, span: TokenSpan, content_type: str | None = None) -> Medium:
        """The medium of a generated span: PNG for pictures, WAV for sounds."""
        service = modality_of(span.modality).service
        (result,) = self.media(service).decode_spans([span], content_type=content_type)
        if isinstance(result, ErnieMultiError):
            raise result
        return result

    def answer(
        self,
        questions: Sequence[Sequence[Segment]],
        params: GenerationParams | Sequence[GenerationParams],
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Answer many questions in shared batches, in order.

        Raises:
            ErnieMultiError: a question can't be tokenised or served.
        """
        if isinstance(params, GenerationParams):
            params = [params] * len(questions)
        flat = self.encode([segment for question in questions for segment in question])
        spans = iter(flat)
        answers = [Answer() for _ in questions]
        ids: list[list[int]] = [[] for _ in questions]
        try:
            for number, (question, choice) in enumerate(zip(questions, params)):
                segments = tuple(TokenSegment(next(spans), segment.role) for segment in question)
                self.engine.submit(Request(str(number), TokenSequence(str(number), segments), choice))
            done = 0
            while self.engine.active:
                for event in self.engine.step():
                    number = int(event.request_id)
                    if isinstance(event, TokenEvent):
                        if event.token < self.text.vocabulary_size:
                            ids[number].append(event.token)
                    elif isinstance(event, SpanEvent):
                        answers[number].spans.append(event.span)
                    elif isinstance(event, DoneEvent):
                        answers[number].finish_reason = event.finish_reason
                        answers[number].usage = event.usage
                        done += 1
                    elif isinstance(event, ErrorEvent):
                        raise ErnieMultiError(event.message)
                if on_progress is not None:
                    on_progress(done)
        finally:
            # After an error or Ctrl-C no question may be left for the next call to find.
            for number in range(len(questions)):
                self.engine.cancel(str(number))
        for answer, said in zip(answers, ids):
            answer.text = self.text.text(said)
        return answers


def question_of(sample: Sample) -> list[Segment]:
    """The context segments of a sample: what the model is shown."""
    return [segment for segment in sample.segments if segment.role == "context"]
