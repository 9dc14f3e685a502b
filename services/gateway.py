"""The gateway: OpenAI's HTTP API over the tokenizer services and the inference workers; needs no torch.

A request's text is tokenised here, its media by the tokenizer services; the tokens go to the ``requests``
stream, and what a worker writes to ``reply:<id>`` comes back as text and media, at once or streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import Counter

from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError, UnavailableError
from ernie5.protocol.generation import Request as GenerationRequest
from ernie5.protocol.generation import parse_model_name
from ernie5.protocol.settings import load_settings
from ernie5.protocol.tokens import TokenSpan
from ernie5.protocol.vocabulary import UnifiedVocabulary
from ernie5.services.answer import AnswerReader
from ernie5.services.api_page import add_page
from ernie5.services.chat import Answer, openai_error, pieces_of
from ernie5.services.conversation import count_tokens, read_conversation
from ernie5.services.gateway_settings import GatewaySettings
from ernie5.services.generation_client import GenerationClient, connect_async
from ernie5.services.generation_stream import WorkerInfo
from ernie5.services.http_common import HttpMetrics, install, parse_json, read_body
from ernie5.services.openai_schema import ChatRequest, generation_params, read_chat_request
from ernie5.services.tokenizer_client import TokenizerClient
from ernie5.tokenizers.text.tokenizer import TextTokenizer


class ModelNotFoundError(InvalidInputError):
    """No running worker serves the model (HTTP 404)."""

    type = "model_not_found"
    status = 404


class ClientGoneError(Exception):
    """The caller closed the connection; nobody is left to answer."""


class Gateway:
    """What the routes share; made by :func:`create_gateway`."""

    def __init__(
        self,
        settings: GatewaySettings,
        text_tokenizer: TextTokenizer,
        tokenizers: TokenizerClient,
        generation: GenerationClient,
        tokens_total: Counter,
    ) -> None:
        self.settings, self.text_tokenizer = settings, text_tokenizer
        self.tokenizers, self.generation, self.tokens_total = tokenizers, generation, tokens_total
        self._cancelling: set[asyncio.Task[None]] = set()

    async def worker_for(self, model: str) -> WorkerInfo:
        """A worker that serves the model, whose text tokenizer must be this gateway's."""
        name = parse_model_name(model).name
        workers = await self.generation.workers()
        if not workers:
            raise UnavailableError(
                "no inference worker is running; start one with: ernie-multi service inference"
            )
        for worker in workers:
            if name in worker.models:
                theirs = worker.tokenizers.get("text", self.text_tokenizer.hash)
                if theirs != self.text_tokenizer.hash:
                    raise TokenizerMismatchError(
                        f"model {name!r} was trained with text tokenizer {theirs}; the gateway has "
                        f"{self.text_tokenizer.hash}",
                        param="model",
                    )
                return worker
        known = sorted({model for worker in workers for model in worker.models})
        raise ModelNotFoundError(f"model {name!r} is not served; served: {', '.join(known)}", param="model")

    async def pieces(
        self, request: GenerationRequest, reader: AnswerReader
    ) -> AsyncGenerator[str | TokenSpan | None]:
        """Submit the request and yield its pieces; whoever stops listening cancels it."""
        await self.generation.submit(request)
        finished = False
        try:
            async with (
                contextlib.aclosing(self.generation.events(request.id)) as events,
                contextlib.aclosing(pieces_of(events, reader)) as pieces,
            ):
                async for piece in pieces:
                    yield piece
            finished = not reader.stopped_early
        finally:
            self.tokens_total.labels("prompt").inc(reader.usage.prompt_tokens)
            self.tokens_total.labels("completion").inc(reader.usage.completion_tokens)
            if not finished:
                # In a task of its own, since this generator may be in the middle of being cancelled.
                task = asyncio.get_running_loop().create_task(self.generation.cancel(request.id))
                self._cancelling.add(task)
                task.add_done_callback(self._cancelling.discard)

    async def chat(self, http: Request, chat: ChatRequest) -> Response:
        await self.worker_for(chat.model)
        params = generation_params(chat, self.settings.default_max_tokens)
        answer = Answer(chat, self.tokenizers)
        sequence = await read_conversation(
            answer.id, chat.messages, self.text_tokenizer, self.tokenizers, self.settings
        )
        request = GenerationRequest(answer.id, sequence, params, chat.model)
        vocabulary = UnifiedVocabulary(self.text_tokenizer.vocabulary_size)
        reader = AnswerReader(self.text_tokenizer, chat.stops, count_tokens(sequence, vocabulary))
        pieces = self.pieces(request, reader)
        if not chat.stream:
            async with contextlib.aclosing(pieces):
                watched = _while_connected(http, pieces)
                return JSONResponse(await answer.completion(watched, reader))
        # The first piece is waited for, so that a request that can't be served still gets its own status.
        try:
            first = await _first(http, pieces)
        except BaseException:
            await pieces.aclose()
            raise
        return StreamingResponse(
            self._stream(answer, first, pieces, reader),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _stream(
        self,
        answer: Answer,
        first: str | TokenSpan | None,
        pieces: AsyncGenerator[str | TokenSpan | None],
        reader: AnswerReader,
    ) -> AsyncIterator[bytes]:
        async def all_pieces() -> AsyncIterator[str | TokenSpan | None]:
            if first is not None:
                yield first
            loop = asyncio.get_running_loop()
            spoke = loop.time()
            async for piece in pieces:
                if piece is None and loop.time() - spoke < self.settings.keep_alive_s:
                    continue
                spoke = loop.time()
                yield piece

        async with contextlib.aclosing(pieces):
            async for chunk in answer.chunks(all_pieces(), reader):
                yield chunk


async def _while_connected(
    http: Request, pieces: AsyncIterator[str | TokenSpan | None]
) -> AsyncIterator[str | TokenSpan]:
    """The pieces without the pauses; ends with ``ClientGoneError`` when the caller has left."""
    async for piece in pieces:
        if piece is not None:
            yield piece
        if await http.is_disconnected():
            raise ClientGoneError


async def _first(http: Request, pieces: AsyncIterator[str | TokenSpan | None]) -> str | TokenSpan | None:
    """The first piece; None for an answer without any."""
    async for piece in _while_connected(http, pieces):
        return piece
    return None


def create_gateway(
    settings: GatewaySettings,
    text_tokenizer: TextTokenizer | None = None,
    tokenizers: TokenizerClient | None = None,
) -> FastAPI:
    """The gateway's application; what isn't given is made from the settings."""
    metrics = HttpMetrics("gateway")
    tokens_total = Counter(
        "ernie_multi_tokens_total", "Tokens of chat completions", ("kind",), registry=metrics.registry
    )
    redis = connect_async(settings.redis)
    gateway = Gateway(
        settings,
        text_tokenizer or TextTokenizer.load(),
        tokenizers or TokenizerClient(settings),
        GenerationClient(redis, settings.max_queued_requests, settings.idle_timeout_s),
        tokens_total,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.tokenizers.aclose()
        await redis.aclose()

    app = FastAPI(
        title="ernie-multi gateway",
        description="OpenAI's API over ernie-multi.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    install(app, settings, metrics, openai_error)
    add_page(app)

    @app.get("/v1/models", tags=["openai"], summary="Models that running workers serve")
    async def models() -> dict[str, Any]:
        found = {name: info for info in await gateway.generation.workers() for name in info.models}
        return {"object": "list", "data": [_model(name, info) for name, info in sorted(found.items())]}

    @app.get("/v1/models/{name}", tags=["openai"], summary="One model")
    async def model(name: str) -> dict[str, Any]:
        return _model(name, await gateway.worker_for(name))

    @app.post(
        "/v1/chat/completions",
        tags=["openai"],
        summary="Answer a conversation with text, pictures and sounds",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": ChatRequest.model_json_schema()}},
            }
        },
    )
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, settings.max_request_bytes)
        try:
            return await gateway.chat(request, read_chat_request(parse_json(body)))
        except ClientGoneError:
            return Response(status_code=499)

    @app.get("/health", tags=["operation"], summary="The process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", tags=["operation"], summary="Redis answers and a worker is running")
    async def ready() -> dict[str, Any]:
        workers = await gateway.generation.workers()
        if not workers:
            raise UnavailableError("no inference worker is running")
        return {"status": "ready", "workers": len(workers)}

    return app


def _model(name: str, info: WorkerInfo) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": info.created, "owned_by": "ernie-multi"}


def run_gateway(settings: GatewaySettings | None = None, stop: threading.Event | None = None) -> None:
    """Run the gateway until SIGINT, SIGTERM or ``stop``; answers in flight are finished.

    Raises:
        InvalidInputError: a wrong setting, no Redis address, or another host than loopback without a key.
    """
    settings = settings if settings is not None else load_settings(GatewaySettings)
    config = uvicorn.Config(
        create_gateway(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=int(settings.drain_timeout_s),
        server_header=False,
    )
    server = _Server(config)
    stop = stop or threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=server.end_with, args=(stop,), daemon=True).start()
    server.run()
    stop.set()


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to its caller and says where it listens."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        body = '{"model": "mini", "messages": [{"role": "user", "content": "Say: seven"}]}'
        print(f"gateway ready at {url}/v1 (API: {url}/docs)", flush=True)
        print(
            f"  try: curl -H 'Content-Type: application/json' -d '{body}' {url}/v1/chat/completions",
            flush=True,
        )

    def end_with(self, stop: threading.Event) -> None:
        stop.wait()
        self.should_exit = True
