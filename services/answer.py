"""From a worker's events to the pieces of an answer: text in whole characters, and media."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ernie5.protocol.generation import DoneEvent, Event, SpanEvent, TokenEvent, Usage
from ernie5.protocol.tokens import CodebooksLayout, ScalesLayout, TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary
from ernie5.tokenizers.text.tokenizer import TextTokenizer


class StopFilter:
    """Passes text on until one of the stop strings; holds back what may be the beginning of one.

    >>> stops = StopFilter(("END",))
    >>> [stops.push(piece) for piece in ("a E", "N", "x END b")], stops.stopped
    (['a ', '', 'ENx '], True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        passed, self._held = self._held, ""
        return passed

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of ``stop`` that ends the held text."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0


class AnswerReader:
    """Turns events into pieces, each a string or a span of media, and keeps count.

    ``finish_reason`` is set once the answer is complete; a stop string ends it before the worker does.
    """

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str], prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = UnifiedVocabulary(tokenizer.vocabulary_size)
        self._decoder = tokenizer.incremental_decoder()
        self._stops = StopFilter(stops)
        self._counted = Usage(prompt_tokens=prompt_tokens)
        self.finish_reason: str | None = None
        self.usage = self._counted

    @property
    def stopped_early(self) -> bool:
        """Whether a stop string ended the answer while the worker goes on."""
        return self._stops.stopped

    def push(self, event: Event) -> list[str | TokenSpan]:
        """The pieces that an event completes (errors are the caller's matter)."""
        if self.finish_reason is not None:
            return []
        if isinstance(event, TokenEvent):
            return self._token(event.token)
        if isinstance(event, SpanEvent):
            self._count(event.span)
            return [*self._rest(), event.span]
        if isinstance(event, DoneEvent):
            pieces = self._rest()
            self.finish_reason = "length" if event.finish_reason == "length" else "stop"
            if event.usage.prompt_tokens:
                self.usage = event.usage
            return pieces
        return []

    def _token(self, token: int) -> list[str | TokenSpan]:
        self.usage = self._counted = dataclasses.replace(
            self._counted,
            completion_tokens=self._counted.completion_tokens + 1,
            completion_text_tokens=self._counted.completion_text_tokens + 1,
        )
        if self._vocabulary.is_text(token):
            text = self._decoder.push(token)
        elif self._vocabulary.marker_name(token) == "separator":
            text = self._decoder.finish() + "\n"
        else:
            return []
        passed = self._stops.push(text)
        if self._stops.stopped:
            self.finish_reason = "stop"
        return [passed] if passed else []

    def _rest(self) -> list[str | TokenSpan]:
        """Text that was held back, before a medium or the end."""
        text = self._stops.push(self._decoder.finish()) + self._stops.finish()
        return [text] if text else []

    def _count(self, span: TokenSpan) -> None:
        new = self._counted
        more: dict[str, int] = {"completion_tokens": new.completion_tokens + len(span)}
        if isinstance(span.layout, ScalesLayout):
            more["completion_image_tokens"] = new.completion_image_tokens + len(span)
        elif isinstance(span.layout, CodebooksLayout):
            more["completion_audio_tokens"] = new.completion_audio_tokens + len(span)
        self.usage = self._counted = dataclasses.replace(new, **more)
