"""A deterministic engine for tests: it answers with the last text and the media of the request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.generation import (
    DoneEvent,
    Event,
    Request,
    SpanEvent,
    TokenEvent,
    Usage,
)
from ernie5.protocol.tokens import ScalesLayout
from ernie5.protocol.vocabulary import UnifiedVocabulary


class EchoEngine:
    """Obeys ``max_tokens`` and ``modalities``; one event a request and step, ``step_s`` seconds each."""

    def __init__(self, text_size: int, capacity: int = 4, step_s: float = 0.0) -> None:
        self.vocabulary = UnifiedVocabulary(text_size)
        self.capacity = capacity
        self.step_s = step_s
        self.scripts: dict[str, list[Event]] = {}
        self.submitted: list[Request] = []

    @property
    def active(self) -> int:
        return len(self.scripts)

    def submit(self, request: Request, resume: Sequence[Event] = ()) -> None:
        if request.params.top_k == 666:
            raise InvalidInputError("top_k 666 is refused by this engine", param="top_k")
        self.submitted.append(request)
        script = self.script(request)
        assert script[: len(resume)] == list(resume)
        self.scripts[request.id] = script[len(resume) :]

    def script(self, request: Request) -> list[Event]:
        """All events of the answer: the last text, then each medium that may be generated, then the end."""
        marker = self.vocabulary.marker
        texts = [item.span for item in request.sequence.segments if item.span.modality == "text"]
        ids = texts[-1].codes.tolist() if texts and "text" in request.params.modalities else []
        kept = ids[: request.params.max_tokens]
        events: list[Event] = [TokenEvent(request.id, token) for token in kept]
        for item in request.sequence.segments:
            span = item.span
            if span.modality == "text" or span.modality not in request.params.modalities:
                continue
            events.append(TokenEvent(request.id, marker(f"begin_{span.modality}")))
            if isinstance(span.layout, ScalesLayout):
                height, width = span.layout.final_grid
                events.append(TokenEvent(request.id, marker(f"grid_{height}x{width}")))
            events.append(SpanEvent(request.id, span))
            events.append(TokenEvent(request.id, marker(f"end_{span.modality}")))
        reason = "length" if len(kept) < len(ids) else "stop"
        usage = Usage(prompt_tokens=7, completion_tokens=len(events), completion_text_tokens=len(kept))
        return [*events, DoneEvent(request.id, reason, usage)]

    def cancel(self, request_id: str) -> None:
        self.scripts.pop(request_id, None)

    def step(self) -> list[Event]:
        if self.step_s and self.scripts:
            time.sleep(self.step_s)
        events = [script.pop(0) for script in self.scripts.values()]
        self.scripts = {name: script for name, script in self.scripts.items() if script}
        return events
