"""The chat completions request, as OpenAI's API defines it, and what of it this gateway serves.

Fields that steer nothing about the answer are accepted and ignored; fields whose effect is not offered are
refused unless they hold the value that asks for nothing; unknown fields are refused with the nearest known
name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ernie5.protocol.errors import InvalidInputError
from ernie5.protocol.generation import MAX_NEW_TOKENS, GenerationParams, parse_model_name
from ernie5.protocol.settings import nearest_name
from ernie5.services.http_common import validation_error

IGNORED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
# Not offered; the value says what asks for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "prediction": (None,),
    "reasoning_effort": ("none", None),
    "verbosity": ("medium", None),
    "web_search_options": (None,),
}
# pcm16 is what streams can be joined from: samples without a header, at the rate that the answer names.
AUDIO_FORMATS = ("wav", "pcm16")
# "audio" is OpenAI's word; the others name this project's modalities.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "audio": ("speech", "sound"),
    "speech": ("speech",),
    "sound": ("sound",),
    "image": ("image",),
    "video": ("video",),
}


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Part):
    type: Literal["text"]
    text: str


class ImageUrl(_Part):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(_Part):
    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(_Part):
    data: str
    format: str
    # Beyond OpenAI: whether it is speech (the default) or another sound.
    modality: Literal["speech", "sound"] = "speech"


class AudioPart(_Part):
    type: Literal["input_audio"]
    input_audio: InputAudio


Part = Annotated[TextPart | ImagePart | AudioPart, Field(discriminator="type")]


class Message(BaseModel):
    """One message. Of an earlier answer, media may be given back as ``images`` and ``audio`` with
    ``data``."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None


class AudioOutput(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: str = "wav"
    voice: Any = None

    @field_validator("format")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in AUDIO_FORMATS:
            raise ValueError(f"audio format {value!r} is unknown; known: {', '.join(AUDIO_FORMATS)}")
        return value


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``; see OpenAI's reference for the fields that carry its names.

    Beyond OpenAI: ``top_k``, ``media_temperature``, ``image_grid`` ("8x8"), ``audio_levels`` and
    ``max_audio_seconds``.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field(max_length=200)
    messages: list[Message] = Field(min_length=1)
    modalities: list[str] | None = None
    audio: AudioOutput | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_NEW_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    top_k: int | None = Field(default=None, ge=0)
    media_temperature: float | None = Field(default=None, ge=0, le=2)
    image_grid: str | None = None
    audio_levels: int | None = Field(default=None, ge=1, le=256)
    max_audio_seconds: float | None = Field(default=None, gt=0, le=600)

    @field_validator("modalities")
    @classmethod
    def _known_outputs(cls, names: list[str] | None) -> list[str] | None:
        unknown = [name for name in names or () if name not in OUTPUTS]
        if unknown or names == []:
            raise ValueError(f"modalities {unknown or names} are not offered; known: {', '.join(OUTPUTS)}")
        return names

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
        stops = [stop] if isinstance(stop, str) else stop or []
        if len(stops) > 4 or any(not item or len(item) > 200 for item in stops):
            raise ValueError("stop takes up to 4 strings of 1 to 200 characters")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the modalities that the answer may hold."""
        wanted = [name for group in self.modalities or ("text",) for name in OUTPUTS[group]]
        return tuple(dict.fromkeys(wanted))


def read_chat_request(value: Any) -> ChatRequest:
    """The request in a parsed body.

    Raises:
        InvalidInputError: an unknown or unsupported field, or a value out of range; ``param`` names it.
    """
    if not isinstance(value, dict):
        raise InvalidInputError(f"the body must be a JSON object, got {type(value).__name__}", param="body")
    fields = dict(value)
    for name in IGNORED:
        fields.pop(name, None)
    for name, nothing in REFUSED.items():
        if name in fields:
            given = fields.pop(name)
            # True == 1 in Python, but not for a caller.
            if not any(
                given == item and isinstance(given, bool) == isinstance(item, bool) for item in nothing
            ):
                raise InvalidInputError(
                    f"{name} = {given!r} is not supported; leave it out or give {nothing[0]!r}", param=name
                )
    for name in fields:
        if name not in ChatRequest.model_fields:
            nearest = nearest_name(str(name), ChatRequest.model_fields)
            hint = f"; did you mean {nearest!r}?" if nearest else ""
            raise InvalidInputError(f"unrecognized request argument {name!r}{hint}", param=str(name))
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise validation_error(_without_tags(error)) from None


def _without_tags(error: ValidationError) -> list[dict[str, Any]]:
    """Places of errors without the names of union members, which no caller has written."""
    problems = []
    for problem in error.errors(include_url=False):
        names = {"str", "list[tagged-union[TextPart,ImagePart,AudioPart]]"}
        place = tuple(part for part in problem["loc"] if part not in names and "[" not in str(part))
        tags = ("text", "image_url", "input_audio")
        place = tuple(
            part for index, part in enumerate(place) if not (part in tags and _is_tag(place, index))
        )
        problems.append({**problem, "loc": place})
    # Of a union, the branch that got furthest tells most.
    return sorted(problems, key=lambda problem: -len(problem["loc"]))


def _is_tag(place: tuple[int | str, ...], index: int) -> bool:
    """Whether a part of a place is the union's tag (it follows the index of a content part)."""
    return index > 0 and isinstance(place[index - 1], int) and index >= 2 and place[index - 2] == "content"


def generation_params(
    request: ChatRequest, default_max_tokens: int, frame_rate: float = 12.5
) -> GenerationParams:
    """The sampling parameters of a request; ``frame_rate`` turns seconds of sound into frames."""
    choice = parse_model_name(request.model)
    grid = None
    if request.image_grid is not None:
        match = re.fullmatch(r"(\d{1,3})x(\d{1,3})", request.image_grid)
        if match is None:
            raise InvalidInputError(
                f"image_grid {request.image_grid!r} must be HEIGHTxWIDTH in cells, as 8x8", param="image_grid"
            )
        grid = (int(match.group(1)), int(match.group(2)))
    frames = request.max_audio_seconds
    given: dict[str, Any] = {
        "max_tokens": request.max_completion_tokens or request.max_tokens or default_max_tokens,
        "temperature": request.temperature,
        "media_temperature": request.media_temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "depth": choice.depth,
        "width": choice.width,
        "experts_per_token": choice.experts_per_token,
        "image_grid": grid,
        "audio_levels": request.audio_levels,
        "max_frames": None if frames is None else max(1, round(frames * frame_rate)),
        "modalities": request.outputs,
    }
    try:
        return GenerationParams(**{name: item for name, item in given.items() if item is not None})
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None
