"""Protects the OpenAI face: what its clients send and get, at once and streamed, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
import wave
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
import redis
import uvicorn
from PIL import Image

from ernie5.protocol.service_settings import RedisSettings
from ernie5.services import generation_stream as wire
from ernie5.services.gateway import create_gateway
from ernie5.services.gateway_settings import GatewaySettings
from ernie5.services.inference import InferenceSettings, InferenceWorker
from ernie5.services.ray_environment import free_ports
from ernie5.services.redis_client import connect
from ernie5.services.redis_server import RedisServer, start_server
from ernie5.services.tokenizer_app import create_app
from ernie5.services.tokenizer_client import TokenizerClient
from ernie5.services.tokenizer_service import load_tokenizer
from ernie5.tokenizers.text.tokenizer import TextTokenizer
from tests.services.echo_engine import EchoEngine
from tests.services.generation_helpers import until
from tests.services.media_files import png, tone

TEXT = TextTokenizer.load()
INFO = wire.WorkerInfo(("mini", "nano"), TEXT.vocabulary_size, {"text": TEXT.hash}, created=1_700_000_000)
QUICK = InferenceSettings(claim_after_s=0.5, heartbeat_s=0.1, block_s=0.02, drain_timeout_s=0.0)


class Services(httpx.AsyncBaseTransport):
    """Carries requests to the applications of the tokenizer services in this process."""

    def __init__(self) -> None:
        self.apps: dict[str, httpx.ASGITransport] = {}
        self.down = False
        self.stumbles = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("refused")
        if self.stumbles:
            self.stumbles -= 1
            return httpx.Response(404, text="Path not found.")
        _, service, path = request.url.path.split("/", 2)
        if service not in self.apps:
            self.apps[service] = httpx.ASGITransport(create_app(load_tokenizer(service)))
        url = request.url.copy_with(raw_path=f"/{path}".encode() + b"?" + request.url.query)
        return await self.apps[service].handle_async_request(
            httpx.Request(request.method, url, headers=request.headers, content=await request.aread())
        )


@pytest.fixture(scope="module")
def services() -> Services:
    return Services()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with start_server(tmp_path_factory.mktemp("gateway-redis")) as running:
        yield running


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[redis.Redis]:
    connected = connect(redis_server.url)
    connected.flushall()
    yield connected
    connected.close()


class RunningWorker:
    """An inference worker in a thread, with the engine at hand."""

    def __init__(self, store: redis.Redis, step_s: float = 0.0) -> None:
        self.engine = EchoEngine(TEXT.vocabulary_size, capacity=8, step_s=step_s)
        self.stop = threading.Event()
        worker = InferenceWorker(self.engine, store, INFO, QUICK)
        self.thread = threading.Thread(target=worker.run, args=(self.stop,))
        self.thread.start()
        until(lambda: store.zcard(wire.WORKERS) > 0, "the worker is announced")

    def __enter__(self) -> RunningWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def worker(store: redis.Redis) -> Iterator[RunningWorker]:
    with RunningWorker(store) as running:
        yield running


def gateway_settings(redis_server: RedisServer, **values: Any) -> GatewaySettings:
    return GatewaySettings(
        redis=RedisSettings(url=redis_server.url), idle_timeout_s=20.0, tokenizers_retry_s=0.5, **values
    )


@pytest.fixture
async def http(
    redis_server: RedisServer, services: Services, store: redis.Redis
) -> AsyncIterator[httpx.AsyncClient]:
    settings = gateway_settings(redis_server, max_request_bytes=1 << 20)
    app = create_gateway(settings, TEXT, TokenizerClient(settings, services))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=30) as client:
        yield client


class Served:
    """A gateway under uvicorn on a free port."""

    def __init__(self, settings: GatewaySettings, services: Services) -> None:
        (port,) = free_ports(1)
        app = create_gateway(settings, TEXT, TokenizerClient(settings, services))
        config = uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=5)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        until(lambda: self.server.started, "the gateway listens")
        self.url = f"http://127.0.0.1:{port}"
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="unused-key", max_retries=0, timeout=30
        )

    def close(self) -> None:
        self.openai.close()
        self.server.should_exit = True
        self.thread.join(15)
        assert not self.thread.is_alive()


@pytest.fixture
def served(redis_server: RedisServer, services: Services, store: redis.Redis) -> Iterator[Served]:
    running = Served(gateway_settings(redis_server), services)
    yield running
    running.close()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": parts[0] if len(parts) == 1 else list(parts)}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def audio(data: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


# With OpenAI's own client.


def test_text_answers_at_once(served: Served, worker: RunningWorker) -> None:
    answer = served.openai.chat.completions.create(model="mini", messages=user("Grüße, 世界! 🐱"))
    assert answer.choices[0].message.content == "Grüße, 世界! 🐱"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7 + answer.usage.completion_tokens)
    assert [item.id for item in served.openai.models.list()] == ["mini", "nano"]
    assert served.openai.models.retrieve("nano").owned_by == "ernie-multi"


def test_text_streams_in_whole_characters(served: Served, worker: RunningWorker) -> None:
    words = "Emoji 🐱🐶 and 汉字, and more"
    stream = served.openai.chat.completions.create(
        model="mini", messages=user(words), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == words
    assert "\ufffd" not in "".join(pieces)
    assert sum(bool(piece) for piece in pieces) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_media_go_in_and_come_out(served: Served, worker: RunningWorker) -> None:
    answer = served.openai.chat.completions.create(
        model="mini:d60-w50-k1",
        messages=user(text("look"), image(png()), audio(tone())),
        modalities=["text", "audio", "image"],  # type: ignore[list-item]
        audio={"voice": "any", "format": "wav"},
        seed=3,
        temperature=0.5,
        top_p=0.9,
        extra_body={"top_k": 40, "image_grid": "4x4"},
    )
    message = answer.choices[0].message
    assert message.content == "look"
    assert message.audio is not None and message.audio.transcript == "look"
    assert message.audio.expires_at > time.time()
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert (file.getframerate(), file.getnframes()) == (16000, 8000)
    (picture,) = message.images  # type: ignore[attr-defined]
    kind, _, data = picture["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (28, 28)
    (request,) = worker.engine.submitted
    assert [item.span.modality for item in request.sequence.segments] == ["text", "image", "speech"]
    assert request.sequence.segments[1].span.features
    params = request.params
    assert (params.depth, params.width, params.experts_per_token) == (0.6, 0.5, 1)
    assert (params.seed, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.9, 40)
    assert params.image_grid == (4, 4)
    assert set(params.modalities) == {"text", "speech", "sound", "image"}


def test_media_stream(served: Served, worker: RunningWorker) -> None:
    stream = served.openai.chat.completions.create(
        model="mini",
        messages=user(text("look"), image(png()), audio(tone())),
        modalities=["text", "audio", "image"],  # type: ignore[list-item]
        audio={"voice": "any", "format": "pcm16"},
        stream=True,
    )
    deltas = [chunk.choices[0].delta.to_dict() for chunk in stream]
    pictures: list[Any] = [delta["images"] for delta in deltas if "images" in delta]
    sounds: list[Any] = [delta["audio"] for delta in deltas if "audio" in delta]
    assert pictures[0][0]["image_url"]["url"].startswith("data:image/png;base64,")
    samples = b"".join(base64.b64decode(sound["data"]) for sound in sounds if "data" in sound)
    assert len(samples) == 2 * 8000
    assert sounds[-1]["transcript"] == "look"


def test_earlier_answers_are_targets(served: Served, worker: RunningWorker) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [text("Three?")]},
    ]
    served.openai.chat.completions.create(model="mini", messages=messages)
    (request,) = worker.engine.submitted
    assert [item.role for item in request.sequence.segments] == ["context", "context", "target", "context"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_answer_and_frees_the_worker(
    served: Served, store: redis.Redis, streamed: bool
) -> None:
    words = "one two three STOP " + "four " * 200
    with RunningWorker(store, step_s=0.005) as worker:
        answer: Any = served.openai.chat.completions.create(
            model="mini", messages=user(words), stop=["STOP", "never"], stream=streamed, max_tokens=5000
        )
        if streamed:
            chunks = list(answer)
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert (content, reason) == ("one two three ", "stop")
        until(lambda: worker.engine.active == 0, "the request is cancelled")
        until(lambda: store.xlen(wire.REQUESTS) == 0, "the entry is gone")


def test_max_tokens_shortens(served: Served, worker: RunningWorker) -> None:
    answer = served.openai.chat.completions.create(
        model="mini", messages=user("a long text that goes on and on"), max_completion_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"
    assert worker.engine.submitted[0].params.max_tokens == 3


def test_a_caller_that_leaves_cancels(served: Served, store: redis.Redis) -> None:
    with RunningWorker(store, step_s=0.005) as worker:
        for streamed in (True, False):
            body = {"model": "mini", "messages": user("word " * 2000), "max_tokens": 5000, "stream": streamed}
            with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
                answer = client.send(
                    client.build_request(
                        "POST",
                        f"{served.url}/v1/chat/completions",
                        json=body,
                        timeout=httpx.Timeout(5, read=0.4),
                    ),
                    stream=streamed,
                )
                # A stream that does answer is left after its first bytes.
                next(answer.iter_bytes())
                raise httpx.ReadTimeout("left")
            until(lambda: worker.engine.active == 0, "the request is cancelled")
            until(lambda: store.xlen(wire.REQUESTS) == 0, "the entry is gone")


def test_many_callers_at_once(served: Served, worker: RunningWorker) -> None:
    answers: dict[int, str | None] = {}

    def ask(number: int) -> None:
        answer = served.openai.chat.completions.create(model="mini", messages=user(f"number {number}"))
        answers[number] = answer.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {number: f"number {number}" for number in range(20)}


def test_a_worker_lost_in_the_middle_is_not_noticed(served: Served, store: redis.Redis) -> None:
    words = "this answer is begun by one worker and ended by another one, " * 4
    result: list[str | None] = []

    def ask() -> None:
        answer = served.openai.chat.completions.create(model="mini", messages=user(words))
        result.append(answer.choices[0].message.content)

    lost = InferenceWorker(EchoEngine(TEXT.vocabulary_size), store, INFO, QUICK, "lost")
    lost._make_group()
    lost._announce()
    thread = threading.Thread(target=ask)
    thread.start()

    def half() -> bool:
        lost.turn()
        return any(store.xlen(key) > 10 for key in store.keys("reply:*"))

    until(half, "the first tokens")
    with RunningWorker(store):
        thread.join(30)
    assert result == [words]


# Refusals.

HELLO = {"model": "mini", "messages": user("hello")}
BAD = [
    ({"n": 2}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"temperature": 3}, 400, "temperature"),
    ({"temperature": "warm"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"temprature": 1}, 400, "temprature"),
    ({"modalities": ["smell"]}, 400, "modalities"),
    ({"modalities": []}, 400, "modalities"),
    ({"audio": {"format": "tape"}}, 400, "audio.format"),
    ({"image_grid": "5x5"}, 400, "image_grid"),
    ({"image_grid": "big"}, 400, "image_grid"),
    ({"stop": ["a"] * 5}, 400, "stop"),
    ({"stop": ""}, 400, "stop"),
    ({"model": "maxi"}, 404, "model"),
    ({"model": "mini:d0"}, 400, "model"),
    ({"model": "mini:x9"}, 400, "model"),
    ({"model": 7}, 400, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": user("")}, 400, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [*user("a"), {"role": "assistant", "content": "b"}]}, 400, "messages"),
    ({"messages": user({"type": "smell"}, text("a"))}, 400, "messages[0].content[0]"),
    ({"messages": user({"type": "text"}, text("a"))}, 400, "messages[0].content[0].text"),
    ({"messages": user(text("a"), image(b""))}, 422, "messages[0].content[1].image_url.url"),
    ({"messages": user(text("a"), image(png()[:60]))}, 422, "messages[0].content[1].image_url.url"),
    ({"messages": user(text("a"), image(tone()))}, 422, "messages[0].content[1].image_url.url"),
    ({"messages": user(text("a"), audio(tone()[:20]))}, 422, "messages[0].content[1].input_audio.data"),
    ({"messages": user(text("a"), audio(tone(0)))}, 422, "messages[0].content[1].input_audio.data"),
    ({"messages": user(text("a"), audio(tone(), "tape"))}, 400, "messages[0].content[1].input_audio.format"),
    ({"top_k": 666}, 400, "top_k"),
]


@pytest.mark.parametrize(("change", "status", "param"), BAD, ids=[str(i) for i in range(len(BAD))])
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_cannot_be_served_is_refused_with_a_reason(
    http: httpx.AsyncClient,
    worker: RunningWorker,
    change: dict[str, Any],
    status: int,
    param: str,
    streamed: bool,
) -> None:
    response = await http.post("/v1/chat/completions", json=HELLO | {"stream": streamed} | change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_addresses_are_not_fetched_unless_enabled(
    http: httpx.AsyncClient, worker: RunningWorker
) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/cat.png"}}
    response = await http.post("/v1/chat/completions", json=HELLO | {"messages": user(part, text("?"))})
    assert response.status_code == 400
    assert "ERNIE_MULTI_GATEWAY_FETCH_URLS=1" in response.json()["error"]["message"]
    part["image_url"] = {"url": "file:///etc/passwd"}
    response = await http.post("/v1/chat/completions", json=HELLO | {"messages": user(part, text("?"))})
    assert response.status_code == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
async def test_bodies_that_are_no_request(
    http: httpx.AsyncClient, worker: RunningWorker, body: bytes
) -> None:
    response = await http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "body"


async def test_invalid_unicode_is_refused(http: httpx.AsyncClient, worker: RunningWorker) -> None:
    body = json.dumps(HELLO | {"messages": user("\ud800 half")})
    response = await http.post("/v1/chat/completions", content=body)
    assert 400 <= response.status_code < 500
    assert "messages[0].content" in response.json()["error"]["param"]


async def test_too_large_a_body_is_refused_while_reading(
    http: httpx.AsyncClient, worker: RunningWorker
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 65536

    response = await http.post("/v1/chat/completions", content=endless())
    assert response.status_code == 413


async def test_without_a_worker_it_is_unavailable(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=HELLO)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    assert "no inference worker" in response.json()["error"]["message"]
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/health")).status_code == 200


async def test_without_a_tokenizer_service_it_is_unavailable(
    http: httpx.AsyncClient, worker: RunningWorker, services: Services
) -> None:
    services.down = True
    try:
        body = HELLO | {"messages": user(text("a"), image(png()))}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 503
        assert "vision tokenizer service" in response.json()["error"]["message"]
        assert (await http.post("/v1/chat/completions", json=HELLO)).status_code == 200
    finally:
        services.down = False


async def test_a_tokenizer_replica_being_replaced_is_waited_for(
    http: httpx.AsyncClient, worker: RunningWorker, services: Services
) -> None:
    services.stumbles = 2
    body = HELLO | {"messages": user(text("a"), image(png()))}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert services.stumbles == 0


async def test_without_redis_it_is_unavailable(services: Services) -> None:
    (port,) = free_ports(1)
    settings = GatewaySettings(redis=RedisSettings(url=f"redis://127.0.0.1:{port}", connect_timeout_s=0.5))
    app = create_gateway(settings, TEXT, TokenizerClient(settings, services))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=30
    ) as client:
        response = await client.post("/v1/chat/completions", json=HELLO)
    assert response.status_code == 503
    assert "Redis" in response.json()["error"]["message"]


async def test_a_full_queue_is_refused(
    redis_server: RedisServer, services: Services, store: redis.Redis
) -> None:
    settings = gateway_settings(redis_server, max_queued_requests=2)
    app = create_gateway(settings, TEXT, TokenizerClient(settings, services))
    InferenceWorker(EchoEngine(TEXT.vocabulary_size), store, INFO, QUICK)._announce()
    for _ in range(2):
        store.xadd(wire.REQUESTS, {"id": "waiting"})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        response = await client.post("/v1/chat/completions", json=HELLO)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert "2 requests wait already (limit 2)" in response.json()["error"]["message"]


async def test_a_model_of_another_text_tokenizer_is_refused(
    http: httpx.AsyncClient, store: redis.Redis
) -> None:
    info = wire.WorkerInfo(("mini",), 300, {"text": "f" * 32})
    worker = InferenceWorker(EchoEngine(300), store, info, QUICK)
    worker._announce()
    response = await http.post("/v1/chat/completions", json=HELLO)
    assert response.status_code == 409
    assert "f" * 32 in response.json()["error"]["message"]


async def test_with_a_key_set_it_is_needed(
    redis_server: RedisServer, services: Services, worker: RunningWorker
) -> None:
    settings = gateway_settings(redis_server, api_key="secret-key-1", host="0.0.0.0")
    app = create_gateway(settings, TEXT, TokenizerClient(settings, services))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        for headers in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "secret-key-1"}):
            response = await client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "authentication_error"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 401
        good = {"Authorization": "Bearer secret-key-1"}
        assert (await client.post("/v1/chat/completions", json=HELLO, headers=good)).status_code == 200
        page = (await client.get("/metrics", headers=good)).text
    assert 'ernie_multi_http_requests_total{method="POST",route="/v1/chat/completions"' in page
    assert 'ernie_multi_tokens_total{kind="prompt"} 7.0' in page
