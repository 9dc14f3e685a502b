"""The prompt of an answer, and the part of an answer that was given before."""

from __future__ import annotations

from collections.abc import Sequence

from ernie5.backbone.config import BackboneConfig
from ernie5.backbone.inference.answer import Answer
from ernie5.backbone.layout import SampleLayout, SampleLayoutBuilder, lay_out_events
from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.generation import Event, SpanEvent, TokenEvent
from ernie5.protocol.grids import schedule_for
from ernie5.protocol.tokens import ScalesLayout
from ernie5.protocol.vocabulary import UnifiedVocabulary


def lay_out_prompt(
    answer: Answer, resume: Sequence[Event], config: BackboneConfig, vocabulary: UnifiedVocabulary
) -> SampleLayout:
    """Lay out the conversation, the ``target`` marker and the events already delivered.

    Sets the answer's clock, the prompt's length, what the answer has produced and the medium it is in the
    middle of.

    Raises:
        InvalidInputError: the model can't take a span, or a resumed event doesn't follow from the one before.
    """
    builder = SampleLayoutBuilder(config, vocabulary)
    lay_out_events(builder, answer.request.sequence)
    if not answer.request.sequence.segments or answer.request.sequence.segments[-1].role != "context":
        raise InvalidInputError("the conversation must end with something to answer", param="messages")
    builder.marker(vocabulary.marker("target"), False)
    answer.prompt_tokens = builder.length
    for event in resume:
        if isinstance(event, TokenEvent):
            answer.owed = None
            _replay_token(answer, event.token, builder, vocabulary)
        elif isinstance(event, SpanEvent):
            if answer.open_medium != event.span.modality:
                raise InvalidInputError(f"a resumed {event.span.modality} was never begun")
            if isinstance(event.span.layout, ScalesLayout):
                builder.generated_picture(event.span)
                answer.usage["image"] += len(event.span)
            else:
                builder.sound(event.span, True)
                answer.usage["audio"] += len(event.span)
            answer.open_medium, answer.layout = None, None
            answer.owed = vocabulary.marker(f"end_{event.span.modality}")
    if answer.owed is not None:
        builder.marker(answer.owed, False)
    answer.clock = builder.clock
    answer.origin = builder.clock
    return builder.finish()


def _replay_token(
    answer: Answer, token: int, builder: SampleLayoutBuilder, vocabulary: UnifiedVocabulary
) -> None:
    name = vocabulary.marker_name(token)
    if name is None and not vocabulary.is_text(token):
        raise InvalidInputError(f"a resumed token {token} is neither text nor a marker")
    if name is not None and name.startswith("begin_"):
        answer.open_medium = name.removeprefix("begin_")
    elif name is not None and name.startswith("grid_"):
        height, width = (int(side) for side in name.removeprefix("grid_").split("x"))
        answer.layout = ScalesLayout(builder.config.bits, schedule_for((height, width)))
    answer.usage["text"] += 1
    answer.anything = True
    builder.marker(token, False)
