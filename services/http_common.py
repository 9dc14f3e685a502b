"""What every HTTP service here shares: keys, size limits, errors and metrics.

The guard is a plain ASGI middleware, so that it works alike in-process, under uvicorn and under Ray Serve
and sees streamed bodies and answers without buffering them.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ernie5.protocol.errors import (
    AuthenticationError,
    ErnieMultiError,
    InvalidInputError,
    InvalidMediaError,
    MediaTooLargeError,
)
from ernie5.protocol.service_settings import ServiceSettings

logger = logging.getLogger(__name__)

ErrorBody = Callable[[ErnieMultiError], dict[str, Any]]

# Probes of an orchestrator carry no key; the API's description holds no secret.
OPEN_PATHS = frozenset({"/health", "/ready", "/docs", "/openapi.json"})


class NotAcceptableError(InvalidInputError):
    """None of the content types in ``Accept`` can be produced (HTTP 406)."""

    type = "not_acceptable"
    status = 406


class ForbiddenError(ErnieMultiError):
    """A request from where none is expected (HTTP 403)."""

    type = "forbidden"
    status = 403


class NotFoundError(InvalidInputError):
    """No such address or model (HTTP 404)."""

    type = "not_found"
    status = 404


class HttpMetrics:
    """Counts and times of requests by route, method and status, in a registry of its own."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self.service = service
        self.requests = Counter(
            "ernie_multi_http_requests_total",
            "HTTP requests",
            ("service", "route", "method", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "ernie_multi_http_request_seconds",
            "Time from the request's first byte to the answer's last",
            ("service", "route"),
            registry=self.registry,
        )

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        self.requests.labels(self.service, route, method, str(status)).inc()
        self.seconds.labels(self.service, route).observe(seconds)

    def page(self) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Guard:
    """Asks for the key, keeps foreign web pages out and counts requests.

    With a key set, every path but the probes and the API's description needs ``Authorization: Bearer KEY``.
    Without one only loopback is served (the settings see to that); a web page open in the user's browser can
    reach loopback too, so requests whose ``Host`` or ``Origin`` is not this machine are refused.
    """

    def __init__(
        self, app: ASGIApp, settings: ServiceSettings, metrics: HttpMetrics, error_body: ErrorBody
    ) -> None:
        self.app, self.settings, self.metrics, self.error_body = app, settings, metrics, error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            problem = self._problem(scope)
            if problem is not None:
                answer = error_response(problem, self.error_body)
                await answer(scope, receive, watched)
            else:
                await self.app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self.metrics.observe(route, scope["method"], status, time.perf_counter() - started)

    def _problem(self, scope: Scope) -> ErnieMultiError | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self.settings.api_key is None:
            for name in ("host", "origin"):
                if name in headers and not _names_loopback(headers[name]):
                    return ForbiddenError(
                        f"{name} {headers[name]!r} is not this machine; without a key only it is served",
                        param=name,
                    )
            return None
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Compared as bytes: compare_digest takes no non-ASCII text.
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.strip().encode("latin-1", "replace"), self.settings.api_key.encode()
        ):
            return AuthenticationError(
                "a key is required: send the header 'Authorization: Bearer KEY'", param="Authorization"
            )
        return None


@functools.lru_cache(maxsize=256)
def _names_loopback(value: str) -> bool:
    """Whether a ``Host`` or ``Origin`` header names this machine; a client sends the same ones each time."""
    host = value.split("://")[-1].split("/")[0]
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:\d*)?", host)
    name = match.group(1).strip("[]").lower() if match else ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def plain_error(error: ErnieMultiError) -> dict[str, Any]:
    """``{"error": {"type", "message", "param"}}``."""
    return error.as_json()


def error_response(error: ErnieMultiError, body: ErrorBody) -> JSONResponse:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = "1"
    return JSONResponse(body(error), status_code=error.status, headers=headers)


def install(
    app: FastAPI, settings: ServiceSettings, metrics: HttpMetrics, error_body: ErrorBody = plain_error
) -> None:
    """Put the guard around ``app`` and give all its errors one shape; adds ``/metrics``."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, ErnieMultiError)
        return error_response(error, error_body)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(validation_error(error.errors()), error_body)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = NotFoundError(f"{error.detail}: {request.method} {request.url.path}; see /docs")
        problem.status = error.status_code
        if error.status_code != 404:
            problem.type = "invalid_input" if error.status_code < 500 else "internal_error"
        return error_response(problem, error_body)

    async def unknown(request: Request, error: Exception) -> Response:
        # The text of an unforeseen error may hold what the caller should not see; the log has it.
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(
            ErnieMultiError("internal error; the service's log has the details"), error_body
        )

    app.add_exception_handler(ErnieMultiError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unknown)
    app.add_middleware(Guard, settings=settings, metrics=metrics, error_body=error_body)
    app.add_api_route(
        "/metrics",
        metrics.page,
        methods=["GET"],
        response_class=Response,
        summary="Prometheus metrics",
        tags=["operation"],
    )


def validation_error(problems: Sequence[Any]) -> InvalidInputError:
    """The first of pydantic's problems, its place written as ``items[2].data``."""
    problem = problems[0]
    where = ""
    for part in problem["loc"]:
        if part in ("body", "query") and not where:
            continue
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    message = problem["msg"].removeprefix("Value error, ")
    return InvalidInputError(f"{where}: {message}" if where else message, param=where or None)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; refused while reading as soon as it exceeds ``limit`` bytes (chunked ones too).

    Raises:
        MediaTooLargeError: the body or its declared length is above ``limit``.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit, int(declared))
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int, size: int | None = None) -> MediaTooLargeError:
    shown = f"of {size} bytes " if size is not None else ""
    return MediaTooLargeError(
        f"the request's body {shown}is above the limit of {limit} bytes "
        "(ERNIE_MULTI_SERVICE_MAX_REQUEST_BYTES)",
        param="body",
    )


def parse_json(body: bytes) -> Any:
    """The JSON value of a body; ``InvalidInputError`` says where it breaks."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}", param="body") from None


def check_unicode(text: str, param: str | None) -> str:
    """``text`` itself, or an error for lone surrogates, which no encoding carries."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidMediaError(
            f"text is not valid Unicode: {error.reason} at character {error.start}", param=param
        ) from None
    return text


def accepted_types(header: str | None) -> list[str]:
    """Content types of an ``Accept`` header, the most wanted first; types with q=0 are left out."""
    ranked: list[tuple[float, int, str]] = []
    for index, part in enumerate((header or "*/*").split(",")):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        if name and quality > 0:
            ranked.append((-quality, index, name))
    return [name for _, _, name in sorted(ranked)]
