"""Protects the tokenizer services' HTTP face: forms of input and answers, a reason for each refusal."""

from __future__ import annotations

import asyncio
import base64
import email
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from PIL import Image

from ernie5.protocol.errors import ErnieMultiError, UnavailableError
from ernie5.protocol.samples import Segment
from ernie5.protocol.tokens import TokenSpan
from ernie5.protocol.wire import TOKENS_CONTENT_TYPE, decode_spans, encode_span, encode_spans
from ernie5.services.batching import Batcher
from ernie5.services.tokenizer_app import create_app
from ernie5.services.tokenizer_service import load_tokenizer
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from ernie5.tokenizers.base import Medium
from ernie5.tokenizers.text.tokenizer import TextTokenizer
from tests.services.media_files import png, png_bomb, png_claiming, tone

Connect = Callable[..., httpx.AsyncClient]
_loaded: dict[str, Any] = {}


def tokenizer(name: str) -> Any:
    if name not in _loaded:
        _loaded[name] = load_tokenizer(name)
    return _loaded[name]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Makes a client of one service's application in this process."""
    opened: list[httpx.AsyncClient] = []

    def make(name: str, base_url: str = "http://127.0.0.1", **settings: Any) -> httpx.AsyncClient:
        app = create_app(tokenizer(name), TokenizerServiceSettings(**settings))
        opened.append(httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url, timeout=60))
        return opened[-1]

    yield make
    for client in opened:
        await client.aclose()


def sent(content_type: str | None, **more: str) -> dict[str, str]:
    return {**({"Content-Type": content_type} if content_type else {}), **more}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


SAMPLES = {
    "text": ("Hello, 世界! 🐱\n".encode(), "text/plain", "text/plain"),
    "audio": (tone(), "audio/wav", "audio/wav"),
    "vision": (png(), "image/png", "image/png"),
}


# Forms of input and answers.


@pytest.mark.parametrize("name", SAMPLES)
async def test_all_forms_of_input_give_the_same_spans(connect: Connect, name: str) -> None:
    data, content_type, _ = SAMPLES[name]
    client = connect(name)
    raw = (await client.post("/v1/tokenize", content=data, headers=sent(content_type))).json()
    modality = raw["spans"][0]["modality"]
    item = {"text": data.decode()} if name == "text" else {"data": encoded(data), "modality": modality}
    bodies = [
        await client.post("/v1/tokenize", json={"items": [item, item]}),
        await client.post(
            "/v1/tokenize", files=[("a", ("a", data, content_type)), ("b", ("b", data, content_type))]
        ),
        await client.post(
            "/v1/tokenize", json={"items": [{"data": encoded(data), "modality": modality}] * 2}
        ),
    ]
    for response in bodies:
        assert response.status_code == 200, response.text
        assert response.json()["spans"] == raw["spans"] * 2
    untold = await client.post(f"/v1/tokenize?modality={modality}", content=data)
    assert untold.json() == raw
    wire = await client.post(
        "/v1/tokenize", content=data, headers=sent(content_type, Accept=TOKENS_CONTENT_TYPE)
    )
    assert wire.headers["content-type"] == TOKENS_CONTENT_TYPE
    (span,) = decode_spans(wire.content)
    assert span.codes.tolist() == raw["spans"][0]["codes"]
    assert span.tokenizer == raw["spans"][0]["tokenizer"] == tokenizer(name).hash


@pytest.mark.parametrize("name", SAMPLES)
async def test_spans_come_back_as_media(connect: Connect, name: str) -> None:
    data, content_type, made = SAMPLES[name]
    client = connect(name)
    spans = (await client.post("/v1/tokenize", content=data, headers=sent(content_type))).json()
    (medium,) = tokenizer(name).decode_spans(
        tokenizer(name).encode_segments([segment_of(name)], features=False)
    )
    for accept in (
        made,
        "*/*",
        made.split("/")[0] + "/*",
        f"text/html;q=0.1, {made}",
        "image/bmp, */*;q=0.5",
    ):
        back = await client.post("/v1/detokenize", json=spans, headers={"Accept": accept})
        assert back.status_code == 200, back.text
        assert back.headers["content-type"].split(";")[0] == made
        assert back.content == medium.data
    answer = await client.post("/v1/detokenize", json=spans, headers={"Accept": "application/json"})
    (item,) = answer.json()["items"]
    assert base64.b64decode(item["data"]) == medium.data


def segment_of(name: str) -> Segment:
    data, content_type, _ = SAMPLES[name]
    modality = {"text": "text", "audio": "speech", "vision": "image"}[name]
    return Segment(modality=modality, data=data, content_type=content_type)


async def test_several_media_come_as_multipart_or_json(connect: Connect) -> None:
    client = connect("text")
    items = {"items": [{"text": "one"}, {"text": "two"}]}
    wire = await client.post("/v1/tokenize", json=items, headers={"Accept": TOKENS_CONTENT_TYPE})
    headers = sent(TOKENS_CONTENT_TYPE)
    as_json = await client.post("/v1/detokenize", content=wire.content, headers=headers)
    assert [base64.b64decode(item["data"]) for item in as_json.json()["items"]] == [b"one", b"two"]
    headers = sent(TOKENS_CONTENT_TYPE, Accept="multipart/mixed")
    parts = await client.post("/v1/detokenize", content=wire.content, headers=headers)
    message = email.message_from_bytes(
        f"Content-Type: {parts.headers['content-type']}\r\n\r\n".encode() + parts.content
    )
    assert [part.get_payload(decode=True) for part in message.get_payload()] == [b"one", b"two"]  # type: ignore[union-attr]
    headers = sent(TOKENS_CONTENT_TYPE, Accept="text/plain")
    refused = await client.post("/v1/detokenize", content=wire.content, headers=headers)
    assert refused.status_code == 406


async def test_a_single_span_message_is_read_too(connect: Connect) -> None:
    span = tokenizer("text").encode("one")
    back = await connect("text").post(
        "/v1/detokenize", content=encode_span(span), headers=sent(TOKENS_CONTENT_TYPE)
    )
    assert back.text == "one"


async def test_features_and_latent_come_on_request_only(connect: Connect) -> None:
    client = connect("vision")
    bare = await client.post("/v1/tokenize", content=png(), headers=sent("image/png"))
    assert not {"features", "latent"} & set(bare.json()["spans"][0])
    rich = await client.post(
        "/v1/tokenize?features=true&latent=true", content=png(), headers=sent("image/png")
    )
    span = rich.json()["spans"][0]
    assert span["features"] and span["latent"]
    back = await client.post("/v1/detokenize", json=rich.json())
    assert Image.open(io.BytesIO(back.content)).size == (28, 28)


# Refusals.

CUT = len(png()) // 2
BAD_MEDIA = [
    ("text", b"", "text/plain", 422),
    ("text", b"\xff\xfe\xfd", "text/plain", 422),
    ("text", b"\xed\xa0\x80", "text/plain", 422),
    ("text", b"x", "image/png", 415),
    ("text", b"x", None, 415),
    ("text", b"x", "application/pdf", 415),
    ("vision", b"", "image/png", 422),
    ("vision", png()[:CUT], "image/png", 422),
    ("vision", png()[:8], "image/png", 422),
    ("vision", b"no picture at all", "image/jpeg", 422),
    ("vision", png_claiming(100_000, 100_000), "image/png", None),
    ("vision", png_claiming(0, 0), "image/png", 422),
    ("vision", png_bomb(), "image/png", None),
    ("vision", tone(), "audio/wav", 415),
    ("audio", b"", "audio/wav", 422),
    ("audio", tone()[:40], "audio/wav", 422),
    ("audio", tone(0), "audio/wav", 422),
    ("audio", tone(subtype="FLOAT", spoil=float("nan")), "audio/wav", 422),
    ("audio", tone(subtype="FLOAT", spoil=float("inf")), "audio/wav", 422),
    ("audio", b"RIFF nonsense" * 9, "audio/wav", 422),
    ("audio", png(), "image/png", 415),
]


@pytest.mark.parametrize(
    ("name", "data", "content_type", "status"), BAD_MEDIA, ids=[str(i) for i in range(len(BAD_MEDIA))]
)
async def test_bad_media_are_refused_with_a_reason(
    connect: Connect, name: str, data: bytes, content_type: str | None, status: int | None
) -> None:
    response = await connect(name).post("/v1/tokenize", content=data, headers=sent(content_type))
    error = response.json()["error"]
    # Where only "too large" or "impossible" is right, either will do.
    assert response.status_code in ((status,) if status else (413, 422)), error
    assert set(error) == {"type", "message", "param"}
    assert len(error["message"]) > 10


BAD_JSON: list[tuple[Any, int, str]] = [
    ({}, 400, "items"),
    ([], 400, None),
    ({"items": []}, 400, "items"),
    ({"items": [{}]}, 400, "items[0]"),
    ({"items": [{"text": "a", "data": "YQ=="}]}, 400, "items[0]"),
    ({"items": [{"text": "a"}, {"text": ""}]}, 422, "items[1].text"),
    ({"items": [{"text": "a"}, {"text": "\ud800"}]}, 422, "items[1].text"),
    ({"items": [{"text": 7}]}, 400, "items[0].text"),
    ({"items": [{"text": "a", "modality": "image"}]}, 415, "items[0].text"),
    ({"items": [{"text": "a", "modality": "smell"}]}, 415, "items[0].text"),
    ({"items": [{"data": "not base64!", "modality": "text"}]}, 422, "items[0].data"),
    ({"items": [{"data": "", "modality": "text"}]}, 422, "items[0].data"),
    ({"items": [{"data": "/w==", "modality": "text"}]}, 422, "items[0].data"),
    ({"items": [{"text": "a", "size": 5}]}, 400, "items[0].size"),
    ({"items": [{"text": "a"}] * 65}, 400, "items"),
    ({"items": [{"text": "a"}], "more": 1}, 400, "more"),
    ({"items": [{"url": "http://127.0.0.1/x", "modality": "text"}]}, 400, "items[0].url"),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD_JSON, ids=[str(i) for i in range(len(BAD_JSON))])
async def test_bad_json_is_refused_at_its_place(connect: Connect, body: Any, status: int, param: str) -> None:
    headers = sent("application/json")
    response = await connect("text").post("/v1/tokenize", content=json.dumps(body), headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xff", b"[" * 200_000])
async def test_what_is_no_json_is_refused(connect: Connect, body: bytes) -> None:
    for path in ("/v1/tokenize", "/v1/detokenize"):
        response = await connect("text").post(path, content=body, headers=sent("application/json"))
        assert response.status_code == 400


async def test_bad_multipart_is_refused(connect: Connect) -> None:
    client = connect("text")
    for content_type in ("multipart/form-data", "multipart/form-data; boundary=x"):
        response = await client.post("/v1/tokenize", content=b"--x\r\nnonsense", headers=sent(content_type))
        assert response.status_code == 400, response.text
    response = await client.post("/v1/tokenize", data={"size": "5"}, files={"a": ("a", b"a", "text/plain")})
    assert response.json()["error"]["param"] == "size"


async def test_bad_spans_are_refused(connect: Connect) -> None:
    client = connect("text")
    text: TextTokenizer = tokenizer("text")
    message = encode_spans([text.encode("hello")])
    for spoiled in (b"", message[:-1], message[:20], message + b"\0", b"x" * 100, message[:-1] + b"\x77"):
        response = await client.post("/v1/detokenize", content=spoiled, headers=sent(TOKENS_CONTENT_TYPE))
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_wire_message"
    spans = (await client.post("/v1/tokenize", json={"items": [{"text": "a"}]})).json()
    spans["spans"][0]["codes"] = [10**9]
    response = await client.post("/v1/detokenize", json=spans)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "spans[0].codes")
    spans["spans"][0] |= {"codes": [5], "tokenizer": "f" * 32}
    assert (await client.post("/v1/detokenize", json=spans)).status_code == 409
    response = await connect("vision").post("/v1/detokenize", json=spans)
    assert response.json()["error"]["param"] == "spans[0].modality"
    response = await client.post("/v1/detokenize", content=b"x", headers=sent("text/plain"))
    assert response.status_code == 415


async def test_large_bodies_are_refused_while_reading(connect: Connect) -> None:
    client = connect("text", max_request_bytes=1 << 16)
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 4096
            yield b"a" * 4096

    response = await client.post("/v1/tokenize", content=endless(), headers=sent("text/plain"))
    assert response.status_code == 413
    assert read < 1 << 18
    for data in ({"content": b"a" * (1 << 17)}, {"files": {"a": ("a", b"a" * (1 << 17), "text/plain")}}):
        response = await client.post("/v1/tokenize?modality=text", **data)
        assert response.status_code == 413, response.text
        assert "65536" in response.json()["error"]["message"]


async def test_answers_that_cannot_be_given_are_refused(connect: Connect) -> None:
    client = connect("vision")
    headers = sent("image/png", Accept="text/html")
    assert (await client.post("/v1/tokenize", content=png(), headers=headers)).status_code == 406
    spans = (await client.post("/v1/tokenize", content=png(), headers=sent("image/png"))).json()
    refused = await client.post("/v1/detokenize", json=spans, headers={"Accept": "audio/wav"})
    assert refused.status_code == 406


async def test_unknown_addresses_and_methods_have_the_same_shape(connect: Connect) -> None:
    client = connect("text")
    for response in (await client.get("/v2"), await client.get("/v1/tokenize")):
        assert response.status_code in (404, 405)
        assert set(response.json()["error"]) == {"type", "message", "param"}


# Keys and foreign pages.


async def test_with_a_key_set_it_is_needed_on_loopback_too(connect: Connect) -> None:
    client = connect("text", api_key="secret-key-1")
    body = {"items": [{"text": "a"}]}
    for headers in ({}, {"Authorization": "Bearer secret-key-2"}, {"Authorization": "Bearer schlüssel"}):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        response = await client.post("/v1/tokenize", json=body, headers=raw)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    headers = {"Authorization": "Bearer secret-key-1"}
    assert (await client.post("/v1/tokenize", json=body, headers=headers)).status_code == 200
    assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200
    assert (await client.get("/metrics")).status_code == 401


def test_beyond_loopback_a_key_is_required() -> None:
    with pytest.raises(ValueError, match="api_key is required"):
        TokenizerServiceSettings(host="0.0.0.0")
    TokenizerServiceSettings(host="0.0.0.0", api_key="secret-key-1")


async def test_pages_of_other_sites_get_nothing_from_loopback(connect: Connect) -> None:
    client = connect("text")
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        response = await client.post("/v1/tokenize", json={"items": [{"text": "a"}]}, headers=headers)
        assert response.status_code == 403
    for headers in ({"Host": "localhost:8000"}, {"Host": "[::1]:8000"}, {"Origin": "http://localhost:3000"}):
        response = await client.post("/v1/tokenize", json={"items": [{"text": "a"}]}, headers=headers)
        assert response.status_code == 200


# Operation.


async def test_operation_pages(connect: Connect) -> None:
    client = connect("text")
    await client.post("/v1/tokenize", json={"items": [{"text": "a"}]})
    assert (await client.get("/health")).json() == {"status": "ok"}
    ready = (await client.get("/ready")).json()
    assert ready["tokenizer"] == tokenizer("text").hash
    assert ready["modalities"] == list(tokenizer("text").modalities)
    page = (await client.get("/metrics")).text
    assert 'ernie_multi_spans_total{modality="text",result="ok"} 1.0' in page
    assert 'route="/v1/tokenize",service="text",status="200"} 1.0' in page
    described = (await client.get("/openapi.json")).json()
    assert {"/v1/tokenize", "/v1/detokenize", "/health", "/ready", "/metrics"} <= set(described["paths"])
    docs = await client.get("/docs")
    assert "/v1/tokenize" in docs.text
    # The page is whole without the internet.
    assert "://" not in docs.text.replace("http://127.0.0.1", "")


class GatedTokenizer(TextTokenizer):
    """Tokenises only while the gate is open; remembers the sizes of its batches."""

    gate: threading.Event
    entered: threading.Event
    batches: list[int]

    def encode_segments(
        self, segments: Sequence[Segment], *, features: bool = True, latent: bool = False
    ) -> list[TokenSpan | ErnieMultiError]:
        self.entered.set()
        assert self.gate.wait(30)
        self.batches.append(len(segments))
        return super().encode_segments(segments, features=features, latent=latent)

    def decode_spans(
        self, spans: Sequence[TokenSpan], *, content_type: str | None = None
    ) -> list[Medium | ErnieMultiError]:
        raise ZeroDivisionError("a defect of the tokenizer")


@pytest.fixture
def gated() -> GatedTokenizer:
    made = GatedTokenizer.load()
    assert isinstance(made, GatedTokenizer)
    made.gate, made.entered, made.batches = threading.Event(), threading.Event(), []
    return made


async def test_the_event_loop_stays_free_and_waiting_requests_share_a_batch(gated: GatedTokenizer) -> None:
    app = create_app(gated)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        posts = [
            asyncio.create_task(client.post("/v1/tokenize", json={"items": [{"text": f"text {number}"}]}))
            for number in range(9)
        ]
        while not gated.entered.is_set():
            await asyncio.sleep(0)  # in-process requests never suspend by themselves
        for _ in range(20):
            assert (await client.get("/health")).status_code == 200
            await asyncio.sleep(0)
        gated.gate.set()
        answers = await asyncio.gather(*posts)
    for number, answer in enumerate(answers):
        assert answer.json()["spans"][0]["codes"] == gated.ids(f"text {number}").tolist()
    assert sum(gated.batches) == 9
    assert len(gated.batches) <= 3


async def test_too_many_waiting_items_are_refused(gated: GatedTokenizer) -> None:
    batcher = Batcher(gated, max_items=4, max_queued=8)
    segment = Segment(modality="text", text="a")
    first = asyncio.create_task(batcher.encode([segment]))
    while not gated.entered.is_set():
        await asyncio.sleep(0)
    waiting = [asyncio.create_task(batcher.encode([segment] * 4)) for _ in range(4)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
    gated.gate.set()
    results = await asyncio.gather(first, *waiting, return_exceptions=True)
    refused = [result for result in results if isinstance(result, UnavailableError)]
    assert len(refused) == 2
    assert max(gated.batches) <= 4
    batcher.close()
    with pytest.raises(UnavailableError):
        await batcher.encode([segment])


async def test_a_defect_is_an_internal_error_that_tells_nothing(gated: GatedTokenizer) -> None:
    app = create_app(gated)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        response = await client.post(
            "/v1/detokenize", content=encode_span(gated.encode("a")), headers=sent(TOKENS_CONTENT_TYPE)
        )
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_error"
    assert "defect" not in response.text
