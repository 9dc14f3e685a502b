"""The services take every modality over HTTP: by content type or by name, JSON or wire, there and back."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from ernie5.protocol.modalities import MODALITIES
from ernie5.protocol.wire import TOKENS_CONTENT_TYPE, decode_spans
from ernie5.services.tokenizer_app import create_app
from ernie5.services.tokenizer_service import load_tokenizer
from ernie5.tokenizers.modalities import BUILT_IN, with_modalities

_apps: dict[str, Any] = {}


def client(service: str) -> httpx.AsyncClient:
    if service not in _apps:
        _apps[service] = create_app(with_modalities(service, load_tokenizer(service)))
    transport = httpx.ASGITransport(_apps[service])
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)


# Name, whether the content type alone tells the modality.
TOLD = {
    "table": True,
    "molecule": True,
    "boxes": True,
    "track": True,
    "strokes": True,
    "protein": True,
    "series": True,
    "points": True,
    "depth": False,
    "sketch": False,
}


@pytest.mark.parametrize("name", TOLD)
async def test_a_medium_goes_there_and_back(name: str) -> None:
    codec = BUILT_IN[name]
    data, content_type = codec.sample.path.read_bytes(), codec.sample.content_type
    headers = {"Content-Type": content_type}
    query = "" if TOLD[name] else f"?modality={name}"
    async with client(MODALITIES[name].service) as http:
        answer = await http.post(f"/v1/tokenize{query}", content=data, headers=headers)
        assert answer.status_code == 200, answer.text
        (span,) = answer.json()["spans"]
        assert (span["modality"], span["layout"]["kind"]) == (name, MODALITIES[name].layout)
        headers["Accept"] = TOKENS_CONTENT_TYPE
        wire = await http.post(f"/v1/tokenize?modality={name}", content=data, headers=headers)
        (told,) = decode_spans(wire.content)
        assert told.codes.tolist() == span["codes"]
        for body in (
            {"json": answer.json()},
            {"content": wire.content, "headers": {"Content-Type": TOKENS_CONTENT_TYPE}},
        ):
            back = await http.post("/v1/detokenize", **body)
            assert back.status_code == 200, back.text
            assert back.headers["content-type"].partition(";")[0] == codec.content_types[0]
        other = await http.post("/v1/detokenize", json=answer.json(), headers={"Accept": content_type})
        value = codec.read_checked(other.content, other.headers["content-type"])
        assert codec.compare(codec.read_checked(data, content_type), value).passed


async def test_all_forms_of_request_take_the_modalities() -> None:
    codec = BUILT_IN["track"]
    data = codec.sample.path.read_bytes()
    items = [
        {"modality": "track", "text": data.decode()},
        {"modality": "track", "data": base64.b64encode(data).decode()},
        {"data": base64.b64encode(data).decode(), "content_type": "application/gpx+xml"},
        {"text": "plain text beside it"},
    ]
    async with client("text") as http:
        answer = await http.post("/v1/tokenize", json={"items": items})
        spans = answer.json()["spans"]
        assert [span["modality"] for span in spans] == ["track", "track", "track", "text"]
        assert spans[0] == spans[1] == spans[2]
        tsv = await http.post(
            "/v1/tokenize", content=b"a\tb\n1\t2", headers={"Content-Type": "text/tab-separated-values"}
        )
        csv = await http.post("/v1/tokenize", content=b"a,b\n1,2", headers={"Content-Type": "text/csv"})
        assert tsv.json() == csv.json()
        ready = (await http.get("/ready")).json()
        assert {"text", "code", "track", "strokes"} <= set(ready["modalities"])


async def test_pictures_stay_pictures_beside_depth_and_sketch() -> None:
    data = BUILT_IN["sketch"].sample.path.read_bytes()
    async with client("vision") as http:
        answer = await http.post("/v1/tokenize", content=data, headers={"Content-Type": "image/png"})
        assert answer.json()["spans"][0]["modality"] == "image"


@pytest.mark.parametrize(
    ("service", "query", "data", "content_type", "status", "why"),
    [
        ("text", "?modality=track", b"<gpx>", "application/gpx+xml", 422, "well-formed"),
        ("text", "?modality=track", b"<gpx/>", "image/png", 415, "comes as application/gpx"),
        ("text", "?modality=molecule", b"CC(", "text/plain", 422, "not closed"),
        ("text", "?modality=series", b"a\n1\n", "text/csv", 415, "goes to the audio service"),
        ("text", "", b"\xff", "text/csv", 422, "UTF-8"),
        ("audio", "", b"a\nnan\n", "text/csv", 422, "nan"),
        ("audio", "?modality=series", b"x", "audio/wav", 415, "text/csv"),
        ("vision", "", b"\x93NUMPY", "application/x-npy", 415, "tells no modality"),
        ("vision", "?modality=depth", b"\x93NUMPY", "application/x-npy", 422, "npy"),
        ("vision", "?modality=points", b"ply", "model/ply", 422, "PLY"),
    ],
)
async def test_a_refusal_tells_the_reason(
    service: str, query: str, data: bytes, content_type: str, status: int, why: str
) -> None:
    async with client(service) as http:
        answer = await http.post(f"/v1/tokenize{query}", content=data, headers={"Content-Type": content_type})
    assert answer.status_code == status, answer.text
    assert why in answer.json()["error"]["message"]


async def test_a_depth_beyond_sixteen_bits_offers_the_other_container() -> None:
    codec = BUILT_IN["depth"]
    async with client("vision") as http:
        answer = await http.post(
            "/v1/tokenize?modality=depth",
            content=codec.sample.path.read_bytes(),
            headers={"Content-Type": "application/x-npy"},
        )
        png = await http.post("/v1/detokenize", json=answer.json(), headers={"Accept": "image/png"})
        assert png.status_code == 422 and "application/x-npy" in png.text
        npy = await http.post("/v1/detokenize", json=answer.json(), headers={"Accept": "application/x-npy"})
        assert npy.content.startswith(b"\x93NUMPY")
