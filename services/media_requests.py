"""Reads what callers send to a tokenizer service: media in one of three forms, or token spans.

A medium comes as the body itself with its Content-Type, as multipart with several files, or as JSON
``{"items": [{"modality", "text" | "data" | "url", "content_type"}]}``. All become segments.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ernie5.protocol.errors import (
    InvalidInputError,
    InvalidMediaError,
    MediaTooLargeError,
    UnsupportedMediaError,
    WireError,
)
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.samples import Segment
from ernie5.protocol.spans_json import span_from_json
from ernie5.protocol.tokens import TokenSpan
from ernie5.protocol.wire import TOKENS_CONTENT_TYPE, decode_span, decode_spans
from ernie5.services.fetch import fetch
from ernie5.services.http_common import check_unicode, parse_json, read_body, validation_error
from ernie5.services.tokenizer_settings import TokenizerServiceSettings

# Types that tell the modality; audio/* does not say whether it is speech, which is by far the likeliest.
_TYPES = {
    "text/plain": "text",
    "text/markdown": "text",
    "text/x-python": "code",
    "text/x-c": "code",
    "text/x-c++": "code",
    "text/x-java": "code",
    "text/javascript": "code",
    "application/javascript": "code",
    "text/csv": "table",
    "text/tab-separated-values": "table",
    "chemical/x-daylight-smiles": "molecule",
}
_FAMILIES = {"image": "image", "video": "video", "audio": "speech", "text": "text"}
# curl sends this where no type is given; it says nothing about the body.
_UNTOLD = ("", "application/octet-stream", "application/x-www-form-urlencoded")


class _Item(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    modality: str | None = None
    text: str | None = None
    data: str | None = None
    url: str | None = None
    content_type: str | None = None

    @model_validator(mode="after")
    def _one_payload(self) -> _Item:
        given = [name for name in ("text", "data", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of text, data (base64) and url is needed, got {given or 'none'}")
        return self


class _Items(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    items: list[_Item]


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Turns requests into segments of the modalities that one service takes.

    ``content_types`` maps further content types to modalities; it goes before the general table.
    """

    service: str
    modalities: tuple[str, ...]
    settings: TokenizerServiceSettings
    content_types: Mapping[str, str] = field(default_factory=dict)

    async def segments(self, request: Request, modality: str | None) -> list[Segment]:
        """The segments of a tokenise request, at least one, at most ``max_batch_items``.

        Raises:
            InvalidInputError: and its kinds, naming the item.
        """
        content_type = media_type(request.headers.get("content-type"))
        if content_type == "application/json":
            return await self._json(request, modality)
        if content_type == "multipart/form-data":
            return await self._multipart(request, modality)
        if content_type in (TOKENS_CONTENT_TYPE, "multipart/mixed"):
            raise UnsupportedMediaError(f"a medium can't have the type {content_type}", param="Content-Type")
        body = await read_body(request, self.settings.max_request_bytes)
        return [self._segment(body, content_type, modality, "body")]

    async def _json(self, request: Request, modality: str | None) -> list[Segment]:
        value = parse_json(await read_body(request, self.settings.max_request_bytes))
        try:
            items = _Items.model_validate(value).items
        except ValidationError as error:
            raise validation_error(error.errors(include_url=False)) from None
        self._check_count(len(items), "items")
        segments = []
        for index, item in enumerate(items):
            where = f"items[{index}]"
            wanted = item.modality or modality
            content_type = media_type(item.content_type)
            if item.text is not None:
                segments.append(self._text_segment(item.text, wanted or "text", f"{where}.text"))
            elif item.data is not None:
                data = _base64(item.data, f"{where}.data")
                segments.append(self._segment(data, content_type, wanted, f"{where}.data"))
            else:
                medium = await self._fetched(item.url or "", f"{where}.url")
                segments.append(
                    self._segment(medium.data, content_type or medium.content_type, wanted, f"{where}.url")
                )
        return segments

    async def _fetched(self, url: str, where: str) -> Any:
        if not self.settings.fetch_urls:
            raise InvalidInputError(
                "fetching addresses is off; send the medium itself (data), or start the service with "
                "ERNIE_MULTI_SERVICE_FETCH_URLS=1",
                param=where,
            )
        return await fetch(
            url,
            max_bytes=self.settings.fetch_max_bytes,
            timeout_s=self.settings.fetch_timeout_s,
            allow_private=self.settings.fetch_private,
            param=where,
        )

    async def _multipart(self, request: Request, modality: str | None) -> list[Segment]:
        limit = self.settings.max_request_bytes
        parser = MultiPartParser(
            Headers(raw=request.headers.raw),
            _limited(request, limit),
            max_files=self.settings.max_batch_items,
            max_fields=self.settings.max_batch_items,
            max_part_size=limit,
        )
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"multipart body: {error}", param="body") from None
        segments = []
        try:
            fields = form.multi_items()
            for name, value in fields:
                if name == "modality" and isinstance(value, str):
                    modality = value
            for name, value in fields:
                if isinstance(value, UploadFile):
                    data = await value.read()
                    segments.append(self._segment(data, media_type(value.content_type), modality, name))
                elif name == "text":
                    segments.append(self._text_segment(value, modality or "text", name))
                elif name != "modality":
                    raise InvalidInputError(
                        f"form field {name!r} is unknown; files, 'text' and 'modality' are taken", param=name
                    )
        finally:
            await form.close()
        self._check_count(len(segments), "body")
        return segments

    def _check_count(self, count: int, where: str) -> None:
        if not 1 <= count <= self.settings.max_batch_items:
            raise InvalidInputError(
                f"{count} items; a request holds 1 to {self.settings.max_batch_items}", param=where
            )

    def _segment(self, data: bytes, content_type: str, modality: str | None, where: str) -> Segment:
        modality = self._modality(content_type, modality, where)
        if not data:
            raise InvalidMediaError(f"the {modality} is empty (0 bytes)", param=where)
        if self.service == "text":
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InvalidMediaError(
                    f"text must be UTF-8: {error.reason} at byte {error.start}", param=where
                ) from None
            return self._text_segment(text, modality, where, content_type)
        return Segment(modality=modality, data=data, content_type=content_type or None)

    def _text_segment(self, text: str, modality: str, where: str, content_type: str = "") -> Segment:
        self._check_taken(modality, where)
        if self.service != "text":
            raise UnsupportedMediaError(f"{modality} can't be given as text; send data (base64)", param=where)
        if not text:
            raise InvalidMediaError(f"the {modality} is empty", param=where)
        return Segment(
            modality=modality, text=check_unicode(text, where), content_type=content_type or "text/plain"
        )

    def _modality(self, content_type: str, modality: str | None, where: str) -> str:
        if modality is None:
            modality = (
                self.content_types.get(content_type)
                or _TYPES.get(content_type)
                or _FAMILIES.get(content_type.partition("/")[0])
            )
            if modality is None and content_type not in _UNTOLD:
                raise UnsupportedMediaError(
                    f"content type {content_type!r} tells no modality; add ?modality= with one of "
                    f"{', '.join(self.modalities)}",
                    param="Content-Type",
                )
            if modality is None:
                raise UnsupportedMediaError(
                    "nothing tells what the body is: send its Content-Type (image/jpeg, audio/wav, "
                    f"text/plain, …) or add ?modality= with one of {', '.join(self.modalities)}",
                    param="Content-Type",
                )
        self._check_taken(modality, where)
        return modality

    def _check_taken(self, modality: str, where: str) -> None:
        if modality in self.modalities:
            return
        elsewhere = MODALITIES.get(modality)
        hint = ""
        if elsewhere is not None and elsewhere.service != self.service:
            hint = f"; {modality} goes to the {elsewhere.service} service"
        raise UnsupportedMediaError(
            f"the {self.service} service takes {', '.join(self.modalities)}, not {modality!r}{hint}",
            param=where,
        )


async def read_spans(request: Request, limit: int, max_items: int) -> list[TokenSpan]:
    """The spans of a detokenise request: a wire message, or the JSON that tokenise answers.

    Raises:
        WireError: damaged, incomplete or impossible spans.
    """
    content_type = media_type(request.headers.get("content-type"))
    if content_type not in (TOKENS_CONTENT_TYPE, "application/json"):
        raise UnsupportedMediaError(
            f"send spans as application/json or {TOKENS_CONTENT_TYPE}, not {content_type or 'untyped'}",
            param="Content-Type",
        )
    body = await read_body(request, limit)
    if content_type == TOKENS_CONTENT_TYPE:
        # Byte 5 of a message is its kind; 1 is a single span.
        spans = [decode_span(body)] if body[5:6] == b"\x01" else decode_spans(body)
    else:
        value = parse_json(body)
        listed = value.get("spans") if isinstance(value, dict) else None
        if not isinstance(listed, list) or set(value) != {"spans"}:
            raise InvalidInputError(
                'the body must be {"spans": [...]}, as tokenize answers it', param="spans"
            )
        spans = []
        for index, item in enumerate(listed):
            try:
                spans.append(span_from_json(item))
            except WireError as error:
                error.param = f"spans[{index}]" + (error.param or "").removeprefix("span")
                raise
    if not 1 <= len(spans) <= max_items:
        raise InvalidInputError(f"{len(spans)} spans; a request holds 1 to {max_items}", param="spans")
    return spans


def media_type(header: str | None) -> str:
    """The type of a Content-Type header without its parameters, lower case."""
    return (header or "").partition(";")[0].strip().lower()


def _base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMediaError(f"{where} is not base64: {error}", param=where) from None


async def _limited(request: Request, limit: int) -> AsyncGenerator[bytes]:
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise MediaTooLargeError(
                f"the request's body is above the limit of {limit} bytes "
                "(ERNIE_MULTI_SERVICE_MAX_REQUEST_BYTES)",
                param="body",
            )
        yield chunk
