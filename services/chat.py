"""Answers of chat completions in OpenAI's two forms: one object, or a stream of chunks."""

from __future__ import annotations

import base64
import io
import json
import secrets
import time
import wave
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ernie5.protocol.errors import ErnieMultiError
from ernie5.protocol.generation import DoneEvent, ErrorEvent, Event, Usage
from ernie5.protocol.tokens import TokenSpan
from ernie5.services.answer import AnswerReader
from ernie5.services.openai_schema import ChatRequest
from ernie5.services.tokenizer_client import ServiceError, TokenizerClient

AUDIO_MODALITIES = ("speech", "sound")
_AUDIO_EXPIRES_S = 3600


@dataclass(slots=True)
class Answer:
    """Names and times of one answer, and how its media are written."""

    request: ChatRequest
    client: TokenizerClient
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    # -- one object
    # ------------------------------------------------------------------------------------------------

    async def completion(
        self, pieces: AsyncIterator[str | TokenSpan], reader: AnswerReader
    ) -> dict[str, Any]:
        """The ``chat.completion`` object once all pieces are there."""
        texts: list[str] = []
        images: list[dict[str, Any]] = []
        sounds: list[bytes] = []
        async for piece in pieces:
            if isinstance(piece, str):
                texts.append(piece)
            elif piece.modality in AUDIO_MODALITIES:
                sounds.append((await self.client.detokenize(piece, "audio/wav")).data)
            else:
                images.append(await self._image(piece))
        text = "".join(texts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not (images or sounds) else None,
            "refusal": None,
        }
        if sounds:
            rate, samples = _join(sounds)
            data = samples if self._audio_format == "pcm16" else _wav(rate, samples)
            message["audio"] = self._audio(data, rate) | {"transcript": text, "expires_at": self._expires}
        if images:
            message["images"] = images
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reader.finish_reason}
        return self._envelope("chat.completion", [choice]) | {"usage": usage_json(reader.usage)}

    # -- a stream
    # --------------------------------------------------------------------------------------------------

    async def chunks(
        self, pieces: AsyncIterator[str | TokenSpan | None], reader: AnswerReader
    ) -> AsyncIterator[bytes]:
        """Server-sent events: a chunk for each piece, the finish reason, the usage where asked, ``[DONE]``.

        A None among the pieces becomes a comment, which keeps proxies from closing a silent connection. An
        error after the first byte can only be told inside the stream.
        """
        yield self._chunk({"role": "assistant", "content": ""})
        text, images, sounding = "", 0, False
        try:
            async for piece in pieces:
                if piece is None:
                    yield b": keep-alive\n\n"
                elif isinstance(piece, str):
                    text += piece
                    yield self._chunk({"content": piece})
                elif piece.modality in AUDIO_MODALITIES:
                    wav = (await self.client.detokenize(piece, "audio/wav")).data
                    rate, samples = _join([wav])
                    # Chunks are joined by the client, which only headerless samples allow; of wav the
                    # first has the header.
                    first = self._audio_format == "wav" and not sounding
                    data = _wav(rate, samples) if first else samples
                    yield self._chunk({"audio": self._audio(data, rate)})
                    sounding = True
                else:
                    image = await self._image(piece)
                    yield self._chunk({"images": [{"index": images, **image}]})
                    images += 1
        except ErnieMultiError as error:
            yield b"data: " + json.dumps(openai_error(error)).encode() + b"\n\n"
            return
        if sounding:
            end = {"id": self._audio_id, "transcript": text, "expires_at": self._expires}
            yield self._chunk({"audio": end})
        yield self._chunk({}, reader.finish_reason)
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield _event(self._envelope("chat.completion.chunk", []) | {"usage": usage_json(reader.usage)})
        yield b"data: [DONE]\n\n"

    # -- shared
    # ----------------------------------------------------------------------------------------------------

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event(self._envelope("chat.completion.chunk", [choice]))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }

    async def _image(self, span: TokenSpan) -> dict[str, Any]:
        wanted = "image/*" if span.modality != "video" else "*/*"
        medium = await self.client.detokenize(span, wanted)
        kind = medium.content_type.partition(";")[0]
        url = f"data:{kind};base64,{base64.b64encode(medium.data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    @property
    def _audio_id(self) -> str:
        return f"audio_{self.id.removeprefix('chatcmpl-')}"

    @property
    def _audio_format(self) -> str:
        return self.request.audio.format if self.request.audio is not None else "wav"

    @property
    def _expires(self) -> int:
        return self.created + _AUDIO_EXPIRES_S

    def _audio(self, data: bytes, rate: int) -> dict[str, Any]:
        # sample_rate is beyond OpenAI, whose pcm16 is always 24 kHz.
        return {"id": self._audio_id, "data": base64.b64encode(data).decode(), "sample_rate": rate}


async def pieces_of(
    events: AsyncIterator[Event | None], reader: AnswerReader
) -> AsyncGenerator[str | TokenSpan | None]:
    """The pieces of an answer; None where there is nothing for a while.

    Raises:
        ServiceError: what the worker found wrong with the request, or that it failed.
    """
    async for event in events:
        if event is None:
            yield None
            continue
        if isinstance(event, ErrorEvent):
            raise ServiceError(event.message, param=event.param, type=event.type, status=event.status)
        for piece in reader.push(event):
            yield piece
        if reader.finish_reason is not None or isinstance(event, DoneEvent):
            return


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens_details": {
            "text_tokens": usage.completion_text_tokens,
            "image_tokens": usage.completion_image_tokens,
            "audio_tokens": usage.completion_audio_tokens,
            "reasoning_tokens": 0,
        },
    }


def openai_error(error: ErnieMultiError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``; the code is this project's own error type."""
    if error.status == 401:
        kind = "authentication_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.type}}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _join(files: list[bytes]) -> tuple[int, bytes]:
    """Rate and 16-bit samples of WAV files that follow one another."""
    rate, parts = 0, []
    for data in files:
        with wave.open(io.BytesIO(data)) as file:
            rate = file.getframerate()
            parts.append(file.readframes(file.getnframes()))
    return rate, b"".join(parts)


def _wav(rate: int, samples: bytes) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples)
    return buffer.getvalue()
