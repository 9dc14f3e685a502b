"""Protects what callers can't reach: fetching goes only to public http(s) addresses, within limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.services.fetch import fetch, is_public
from ernie5.services.tokenizer_app import create_app
from ernie5.services.tokenizer_service import load_tokenizer
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from tests.services.media_files import png


class _Site(BaseHTTPRequestHandler):
    release: threading.Event

    def do_GET(self) -> None:
        if self.path == "/picture":
            self._answer(200, png(), {"Content-Type": "image/png; q=1"})
        elif self.path == "/large":
            self._answer(200, b"x" * 100_000)
        elif self.path == "/endless-redirect":
            self._answer(302, b"", {"Location": "/endless-redirect"})
        elif self.path == "/redirect":
            self._answer(302, b"", {"Location": "/picture"})
        elif self.path == "/to-file":
            self._answer(302, b"", {"Location": "file:///etc/passwd"})
        elif self.path == "/to-metadata":
            self._answer(302, b"", {"Location": "http://169.254.169.254/latest"})
        elif self.path == "/host":
            self._answer(200, self.headers["Host"].encode())
        elif self.path == "/slow":
            self.release.wait(20)
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def site() -> Iterator[str]:
    """A site on loopback, which is reached only where private addresses are allowed."""
    _Site.release = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    _Site.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


async def read(url: str, private: bool = True, max_bytes: int = 50_000, timeout_s: float = 10.0) -> bytes:
    medium = await fetch(url, max_bytes=max_bytes, timeout_s=timeout_s, allow_private=private, param="url")
    return medium.data


async def test_media_are_read_with_their_type(site: str) -> None:
    medium = await fetch(f"{site}/picture", max_bytes=50_000, timeout_s=10, allow_private=True)
    assert (medium.data, medium.content_type) == (png(), "image/png")
    assert await read(f"{site}/redirect") == png()
    host = site.removeprefix("http://").replace("127.0.0.1", "localhost")
    assert await read(f"http://{host}/host") == host.encode()


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/missing", InvalidMediaError),
        ("/large", MediaTooLargeError),
        ("/endless-redirect", InvalidMediaError),
        ("/to-file", InvalidInputError),
    ],
)
async def test_limits_hold(site: str, path: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        await read(site + path)


async def test_a_slow_site_is_given_up(site: str) -> None:
    with pytest.raises(InvalidMediaError, match=r"within 0\.2 s"):
        await read(f"{site}/slow", timeout_s=0.2)


async def test_a_dead_site_is_an_error_of_the_request(site: str) -> None:
    with pytest.raises(InvalidMediaError, match="ConnectError"):
        await read("http://127.0.0.1:1/x")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://localhost/x",
        "http://10.1.2.3/x",
        "http://[::1]/x",
        "http://[::ffff:127.0.0.1]/x",
        "http://169.254.169.254/latest/meta-data",
        "http://0.0.0.0/x",
        "http://2130706433/x",
        "ftp://8.8.8.8/x",
        "file:///etc/passwd",
        "http:///x",
        "http://user:password@8.8.8.8/x",
        "http://8.8.8.8:99999/x",
        "//8.8.8.8/x",
        "x",
    ],
)
async def test_what_is_not_public_http_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await read(url, private=False)
    assert caught.value.param == "url"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("192.168.0.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


async def test_the_service_fetches_where_it_is_enabled(site: str) -> None:
    body = {"items": [{"url": f"{site}/picture"}]}
    answers = []
    for settings in (
        TokenizerServiceSettings(),
        TokenizerServiceSettings(fetch_urls=True),
        TokenizerServiceSettings(fetch_urls=True, fetch_private=True),
    ):
        transport = httpx.ASGITransport(create_app(load_tokenizer("vision"), settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answers.append(await client.post("/v1/tokenize", json=body))
    off, public_only, everything = answers
    assert off.status_code == public_only.status_code == 400
    assert "ERNIE_MULTI_SERVICE_FETCH_URLS=1" in off.json()["error"]["message"]
    assert "not public" in public_only.json()["error"]["message"]
    assert everything.json()["spans"][0]["modality"] == "image"
