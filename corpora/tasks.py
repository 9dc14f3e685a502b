"""Tasks: how an item of a corpus becomes a sample, and which tasks each kind of item has.

A task says which media the model understands (``context``, no loss) and which it generates (``target``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ernie5.corpora.digits import DIGIT_WORDS, digit_value
from ernie5.corpora.items import Item, Medium
from ernie5.protocol.samples import Role, Sample, Segment

__all__ = ["DIGIT_WORDS", "TASKS", "Task", "build_sample", "digit_value", "tasks_of"]

QUESTIONS: dict[str, str] = {
    "digit_read": "Which digit is this?",
    "digit_draw": "Draw the digit {label}.",
    "speech_hear": "Transcribe.",
    "speech_say": "Say: {label}",
    "emoji_name_en": "What is this?",
    "emoji_name_zh": "这是什么？",
    "emoji_draw": "Draw: {name}",
    "clip_name_en": "What is this?",
    "clip_name_zh": "这是什么？",
    "clip_draw": "Animate: {name}",
    "caption": "What is this?",
    "draw": "Draw: {label}",
    "sound_name": "What makes this sound?",
    "sound_make": "Make the sound of: {label}",
}
"""Task to the text it shows the model; the fields are filled from the item."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task: its name, the kinds of items that have it, and the segments it makes of one."""

    name: str
    kinds: frozenset[str]
    segments: Callable[[Item], tuple[Segment, ...]]
    fits_metadata: Callable[[Mapping[str, Any]], bool] = lambda metadata: True


def _segment(medium: Medium, role: Role) -> Segment:
    return Segment(
        modality=medium.modality,
        role=role,
        text=medium.text,
        data=medium.data,
        content_type=medium.content_type,
    )


def _text(text: str, role: Role = "context") -> Segment:
    return Segment(modality="text", role=role, text=text)


def _names(item: Item) -> dict[str, Any]:
    words = item.media.get("text")
    label = item.metadata.get("label") or ((words.text or "").strip() if words else "")
    names = item.metadata.get("names") or {}
    return {"label": label, "name": names.get("en", label)}


def _ask(task: str, modality: str, answer: Callable[[Item], str]) -> Callable[[Item], tuple[Segment, ...]]:
    """Show a medium and a question; the answer is text."""

    def segments(item: Item) -> tuple[Segment, ...]:
        return (
            _segment(item.media[modality], "context"),
            _text(QUESTIONS[task]),
            _text(answer(item), "target"),
        )

    return segments


def _make(task: str, modality: str) -> Callable[[Item], tuple[Segment, ...]]:
    """Ask in words; the answer is the medium."""

    def segments(item: Item) -> tuple[Segment, ...]:
        return _text(QUESTIONS[task].format(**_names(item))), _segment(item.media[modality], "target")

    return segments


def _label(item: Item) -> str:
    return str(_names(item)["label"])


def _name_in(language: str) -> Callable[[Item], str]:
    return lambda item: str(item.metadata["names"][language])


def _only_media(item: Item) -> tuple[Segment, ...]:
    return tuple(_segment(medium, "target") for medium in item.media.values())


def _named(language: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda metadata: bool((metadata.get("names") or {}).get(language))


def _task(
    name: str,
    kinds: str,
    segments: Callable[[Item], tuple[Segment, ...]],
    fits_metadata: Callable[[Mapping[str, Any]], bool] = lambda metadata: True,
) -> Task:
    return Task(name, frozenset(kinds.split()), segments, fits_metadata)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task("digit_read", "digit_image", _ask("digit_read", "image", _label)),
        _task("digit_draw", "digit_image", _make("digit_draw", "image")),
        _task("speech_hear", "spoken_word spoken_text", _ask("speech_hear", "speech", _label)),
        _task("speech_say", "spoken_word spoken_text", _make("speech_say", "speech")),
        _task("emoji_name_en", "named_picture", _ask("emoji_name_en", "image", _name_in("en")), _named("en")),
        _task("emoji_name_zh", "named_picture", _ask("emoji_name_zh", "image", _name_in("zh")), _named("zh")),
        _task("emoji_draw", "named_picture", _make("emoji_draw", "image"), _named("en")),
        _task("clip_name_en", "named_clip", _ask("clip_name_en", "video", _name_in("en")), _named("en")),
        _task("clip_name_zh", "named_clip", _ask("clip_name_zh", "video", _name_in("zh")), _named("zh")),
        _task("clip_draw", "named_clip", _make("clip_draw", "video"), _named("en")),
        _task("caption", "captioned_picture", _ask("caption", "image", _label)),
        _task("draw", "captioned_picture", _make("draw", "image")),
        _task("sound_name", "named_sound", _ask("sound_name", "sound", _label)),
        _task("sound_make", "named_sound", _make("sound_make", "sound")),
        _task("text", "text", _only_media),
        _task("media", "media", _only_media),
    )
}
"""All tasks by name."""

METADATA_KEYS = ("label", "digit", "language", "voice", "style", "names", "source", "human")
"""What a sample keeps of its item's metadata, where the item has it."""


def tasks_of(kind: str) -> tuple[str, ...]:
    """Names of the tasks that items of ``kind`` have, in the table's order; none for an unknown kind."""
    return tuple(task.name for task in TASKS.values() if kind in task.kinds)


def build_sample(task: str, item: Item, split: str) -> Sample:
    """The sample that ``task`` makes of ``item``; its metadata names both, and the split.

    Raises:
        KeyError: the item lacks a medium or a name the task needs (its kind promises them).
    """
    metadata = {key: item.metadata[key] for key in METADATA_KEYS if item.metadata.get(key) is not None}
    return Sample(
        segments=TASKS[task].segments(item),
        metadata={"task": task, "item": item.item_id, "split": split, **metadata},
    )
