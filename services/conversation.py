"""From chat messages to the token sequence that the model continues.

Parts become segments in their order: what system and user say is context, earlier answers are targets. Text
is tokenised here; media go to the tokenizer services, all at once.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from typing import Any

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError
from ernie5.protocol.samples import Role
from ernie5.protocol.tokens import ScalesLayout, TokenSegment, TokenSequence, TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary
from ernie5.services.fetch import fetch
from ernie5.services.gateway_settings import GatewaySettings
from ernie5.services.http_common import check_unicode
from ernie5.services.openai_schema import AudioPart, ImagePart, Message, TextPart
from ernie5.services.tokenizer_client import TokenizerClient
from ernie5.tokenizers.base import Medium
from ernie5.tokenizers.text.tokenizer import TextTokenizer

_DATA_URL = re.compile(
    r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*(?P<base64>;base64)?,", re.ASCII
)
_INPUT_FORMATS = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "ogg": "audio/ogg",
    "m4a": "audio/mp4",
    "webm": "audio/webm",
}


async def read_conversation(
    request_id: str,
    messages: list[Message],
    text_tokenizer: TextTokenizer,
    client: TokenizerClient,
    settings: GatewaySettings,
) -> TokenSequence:
    """The sequence of a conversation, ending with context.

    Raises:
        InvalidInputError: and its kinds; ``param`` names the message and part.
        UnavailableError: a tokenizer service that is needed does not answer.
    """
    if len(messages) > settings.max_messages:
        raise InvalidInputError(
            f"{len(messages)} messages, above the limit of {settings.max_messages}", param="messages"
        )
    if messages[-1].role == "assistant":
        raise InvalidInputError("the last message must not be the assistant's", param="messages")
    parts = [
        (role, part, where)
        for index, message in enumerate(messages)
        for role, part, where in _parts(message, f"messages[{index}]")
    ]
    media = sum(not isinstance(part, str) for _, part, _ in parts)
    if media > settings.max_media:
        raise InvalidInputError(f"{media} media, above the limit of {settings.max_media}", param="messages")

    async def span(part: Any, where: str) -> TokenSpan:
        if isinstance(part, str):
            return text_tokenizer.encode(check_unicode(part, where))
        return await _medium_span(part, where, client, settings)

    spans = await asyncio.gather(*(span(part, where) for _, part, where in parts))
    segments = [TokenSegment(item, role) for item, (role, _, _) in zip(spans, parts)]
    if not segments or segments[-1].role != "context":
        raise InvalidInputError("the last message is empty", param=f"messages[{len(messages) - 1}].content")
    return TokenSequence(request_id, tuple(segments))


def _parts(message: Message, where: str) -> list[tuple[Role, Any, str]]:
    """Role, text or part, and place of everything in a message that is not empty."""
    role: Role = "target" if message.role == "assistant" else "context"
    if message.content is None or isinstance(message.content, str):
        return [(role, message.content, f"{where}.content")] if message.content else []
    found: list[tuple[Role, Any, str]] = []
    for index, part in enumerate(message.content):
        place = f"{where}.content[{index}]"
        if isinstance(part, TextPart):
            if part.text:
                found.append((role, part.text, f"{place}.text"))
        else:
            found.append((role, part, place))
    return found


async def _medium_span(
    part: ImagePart | AudioPart, where: str, client: TokenizerClient, settings: GatewaySettings
) -> TokenSpan:
    if isinstance(part, AudioPart):
        audio = part.input_audio
        content_type = _INPUT_FORMATS.get(audio.format)
        if content_type is None:
            raise InvalidInputError(
                f"audio format {audio.format!r} is unknown; known: {', '.join(_INPUT_FORMATS)}",
                param=f"{where}.input_audio.format",
            )
        place = f"{where}.input_audio.data"
        return await client.tokenize(
            Medium(_decoded(audio.data, place), content_type), audio.modality, param=place
        )
    place = f"{where}.image_url.url"
    medium = await _image(part.image_url.url, place, settings)
    return await client.tokenize(medium, "image", param=place)


async def _image(url: str, where: str, settings: GatewaySettings) -> Medium:
    match = _DATA_URL.match(url)
    if match is not None:
        if match["base64"] is None:
            raise InvalidInputError("a data URL must be base64: data:image/png;base64,…", param=where)
        return Medium(_decoded(url[match.end() :], where), match["type"] or "application/octet-stream")
    if not url.lower().startswith(("http://", "https://")):
        raise InvalidInputError(f"{url[:40]!r} is no data URL (data:image/png;base64,…)", param=where)
    if not settings.fetch_urls:
        raise InvalidInputError(
            "fetching pictures is off; send a data URL (data:image/png;base64,…), or start the gateway with "
            "ERNIE_MULTI_GATEWAY_FETCH_URLS=1",
            param=where,
        )
    return await fetch(
        url,
        max_bytes=settings.fetch_max_bytes,
        timeout_s=settings.fetch_timeout_s,
        allow_private=settings.fetch_private,
        param=where,
    )


def _decoded(text: str, where: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMediaError(f"not base64: {error}", param=where) from None
    if not data:
        raise InvalidMediaError("the medium is empty (0 bytes)", param=where)
    return data


def count_tokens(sequence: TokenSequence, vocabulary: UnifiedVocabulary) -> int:
    """Positions of a prompt: ids, markers, frames; one for each merged patch of an understood picture."""
    count = 1  # the target marker that opens the answer
    for item, is_target in sequence.events(vocabulary):
        if not isinstance(item, TokenSpan):
            count += 1
        elif isinstance(item.layout, ScalesLayout) and item.features and not is_target:
            count += len(next(iter(item.features.values())))
        else:
            count += len(item)
    return count
