"""The HTTP face of one tokenizer: media in, token spans out, and back.

``create_app`` gives a plain ASGI application, so the same code answers under Ray Serve, under uvicorn and
in-process. It is given the tokenizer and knows nothing of its modality.
"""

from __future__ import annotations

import base64
import secrets
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import Counter

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.spans_json import span_to_json
from ernie5.protocol.tokens import TokenSpan
from ernie5.protocol.wire import TOKENS_CONTENT_TYPE, encode_spans
from ernie5.services.api_page import add_page
from ernie5.services.batching import Batcher
from ernie5.services.http_common import HttpMetrics, NotAcceptableError, accepted_types, install
from ernie5.services.media_requests import MediaReader, read_spans
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from ernie5.tokenizers.base import Medium, Tokenizer

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ITEMS = {
    "schema": {
        "type": "object",
        "required": ["items"],
        "properties": {
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "modality": {"type": "string", "enum": list(MODALITIES)},
                        "text": {"type": "string"},
                        "data": {"type": "string", "format": "byte"},
                        "url": {"type": "string", "format": "uri"},
                        "content_type": {"type": "string"},
                    },
                },
            }
        },
    }
}
_FILES = {"schema": {"type": "object", "additionalProperties": {"type": "string", "format": "binary"}}}
_SPANS = {
    "schema": {"type": "object", "properties": {"spans": {"type": "array", "items": {"type": "object"}}}}
}


def service_of(tokenizer: Tokenizer) -> str:
    """The service (text, audio, vision) that a tokenizer's modalities belong to."""
    return next(MODALITIES[name].service for name in tokenizer.modalities if name in MODALITIES)


def create_app(
    tokenizer: Tokenizer,
    settings: TokenizerServiceSettings | None = None,
    *,
    state: Callable[[], dict[str, Any]] | None = None,
    on_start: Callable[[], None] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> FastAPI:
    """The application of one tokenizer service.

    ``state`` adds to what ``/ready`` tells; ``on_start`` and ``on_stop`` run with the application (the
    replica starts and stops draining its work stream with them).
    """
    settings = settings or TokenizerServiceSettings()
    service = service_of(tokenizer)
    metrics = HttpMetrics(service)
    spans_total = Counter(
        "ernie_multi_spans_total",
        "Media tokenised over HTTP",
        ("modality", "result"),
        registry=metrics.registry,
    )
    codes_total = Counter("ernie_multi_codes_total", "Codes made", ("modality",), registry=metrics.registry)
    batcher = Batcher(
        tokenizer, settings.max_batch_items, settings.max_queued_requests, settings.max_queued_bytes
    )
    types = getattr(tokenizer, "content_types", {})
    reader = MediaReader(service, tuple(tokenizer.modalities), settings, types)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if on_start is not None:
            on_start()
        yield
        if on_stop is not None:
            on_stop()
        batcher.close()

    app = FastAPI(
        title=f"ernie-multi {service} tokenizer",
        description=f"Turns {', '.join(tokenizer.modalities)} into unified tokens and back.",
        version=tokenizer.hash[:12],
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    install(app, settings, metrics)
    add_page(app)

    @app.post(
        "/v1/tokenize",
        tags=["tokens"],
        summary="Media to token spans",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"*/*": _BINARY, "application/json": _ITEMS, "multipart/form-data": _FILES},
            }
        },
        responses={200: {"content": {"application/json": _SPANS, TOKENS_CONTENT_TYPE: _BINARY}}},
    )
    async def tokenize(
        request: Request,
        modality: Annotated[str | None, Query(description="where the type doesn't tell")] = None,
        features: Annotated[bool, Query(description="add features for understanding")] = False,
        latent: Annotated[bool, Query(description="add the latent before quantisation")] = False,
    ) -> Response:
        wanted = _choose(request, ("application/json", TOKENS_CONTENT_TYPE))
        segments = await reader.segments(request, modality)
        results = await batcher.encode(segments, features=features, latent=latent)
        outcomes = Tally(
            (segment.modality, "error" if isinstance(result, ErnieMultiError) else "ok")
            for segment, result in zip(segments, results)
        )
        for labels, count in outcomes.items():
            spans_total.labels(*labels).inc(count)
        spans: list[TokenSpan] = _all_good(results, "items")
        made: Tally[str] = Tally()
        for span in spans:
            made[span.modality] += span.codes.size
        for name, count in made.items():
            codes_total.labels(name).inc(count)
        if wanted == TOKENS_CONTENT_TYPE:
            return Response(encode_spans(spans), media_type=TOKENS_CONTENT_TYPE)
        return JSONResponse({"spans": [span_to_json(span, features or latent) for span in spans]})

    @app.post(
        "/v1/detokenize",
        tags=["tokens"],
        summary="Token spans to media",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": _SPANS, TOKENS_CONTENT_TYPE: _BINARY},
            }
        },
        responses={200: {"content": {"*/*": _BINARY}}},
    )
    async def detokenize(request: Request) -> Response:
        spans = await read_spans(request, settings.max_request_bytes, settings.max_batch_items)
        for index, span in enumerate(spans):
            if span.modality not in tokenizer.modalities:
                raise InvalidInputError(
                    f"the {service} service makes {', '.join(tokenizer.modalities)}, not {span.modality!r}",
                    param=f"spans[{index}].modality",
                )
        return await _as_media(batcher, spans, accepted_types(request.headers.get("accept")))

    @app.get("/health", tags=["operation"], summary="The process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", tags=["operation"], summary="The tokenizer is loaded and takes work")
    async def ready() -> dict[str, Any]:
        return {
            "status": "ready",
            "service": service,
            "modalities": list(tokenizer.modalities),
            "tokenizer": tokenizer.hash,
            **(state() if state is not None else {}),
        }

    return app


def _choose(request: Request, offers: tuple[str, ...]) -> str:
    """The offer that the Accept header wants most; the first for ``*/*``."""
    for wanted in accepted_types(request.headers.get("accept")):
        for offer in offers:
            if wanted in (offer, "*/*", offer.partition("/")[0] + "/*"):
                return offer
    raise NotAcceptableError(f"this address answers {' or '.join(offers)}", param="Accept")


def _all_good(results: Sequence[Any], what: str) -> list[Any]:
    """The results; the first error among them is raised with the place of its item."""
    for index, result in enumerate(results):
        if isinstance(result, ErnieMultiError):
            # Some errors are shared constants of a tokenizer: the place belongs to this request only.
            place = f"{what}[{index}]" if len(results) > 1 else result.param or what
            raise type(result)(result.message, param=place)
    return list(results)


async def _as_media(batcher: Batcher, spans: list[TokenSpan], accepted: list[str]) -> Response:
    """One medium as itself; several as multipart/mixed or JSON with base64.

    The accepted types are tried in order, so ``Accept: image/webp, image/png`` gets what can be made.
    """
    problem: ErnieMultiError | None = None
    for wanted in accepted:
        if wanted in ("multipart/mixed", "multipart/*", "application/json", "application/*", "*/*"):
            content_type = None
        elif len(spans) > 1:
            problem = problem or NotAcceptableError(
                f"{len(spans)} media can't be one {wanted}; accept multipart/mixed or application/json",
                param="Accept",
            )
            continue
        else:
            content_type = None if wanted.endswith("/*") else wanted
        results = await batcher.decode(spans, content_type=content_type)
        failed = next((result for result in results if isinstance(result, ErnieMultiError)), None)
        if failed is not None and content_type is not None and failed.status == 415:
            problem = problem or NotAcceptableError(failed.message, param="Accept")
            continue
        media: list[Medium] = _all_good(results, "spans")
        if wanted.startswith("multipart/"):
            return _multipart(media)
        if wanted in ("application/json", "application/*") or (wanted == "*/*" and len(media) > 1):
            return JSONResponse(
                {
                    "items": [
                        {
                            "modality": span.modality,
                            "content_type": medium.content_type,
                            "data": base64.b64encode(medium.data).decode(),
                        }
                        for span, medium in zip(spans, media)
                    ]
                }
            )
        made = media[0].content_type.partition(";")[0]
        if wanted == "*/*" or wanted in (made, made.partition("/")[0] + "/*"):
            return Response(media[0].data, media_type=media[0].content_type)
        problem = problem or NotAcceptableError(
            f"{spans[0].modality} becomes {made}, not {wanted}", param="Accept"
        )
    raise problem or NotAcceptableError("no type is accepted", param="Accept")


def _multipart(media: Sequence[Medium]) -> Response:
    boundary = secrets.token_hex(16)
    parts = [
        f"--{boundary}\r\nContent-Type: {medium.content_type}\r\n\r\n".encode() + medium.data + b"\r\n"
        for medium in media
    ]
    body = b"".join([*parts, f"--{boundary}--\r\n".encode()])
    return Response(body, media_type=f"multipart/mixed; boundary={boundary}")
