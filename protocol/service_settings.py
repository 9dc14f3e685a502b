"""Settings that several services share: Redis, HTTP, the token stream."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from ernie5.protocol.settings import Settings

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class RedisSettings(Settings):
    """Where Redis is; without ``url`` a server is started as a child process.

    ``url`` is ``redis://``, ``rediss://`` (TLS) or ``unix://``; a password may stand in it or in
    ``password``, which wins. ``tls_ca`` is a PEM file of the authority that signed the server's certificate
    (default: the system's), ``tls_cert`` and ``tls_key`` are the client's own.
    """

    section: ClassVar[str] = "redis"
    environment_names: ClassVar[dict[str, str]] = {"url": "REDIS_URL", "password": "REDIS_PASSWORD"}

    url: str | None = Field(default=None, repr=False)
    password: str | None = Field(default=None, repr=False)
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_check_hostname: bool = True
    connect_timeout_s: Seconds = 5.0
    timeout_s: Seconds = 30.0
    retries: int = Field(default=5, ge=0)
    max_connections: Positive = 64

    @model_validator(mode="after")
    def _usable(self) -> RedisSettings:
        if self.url is None:
            return self
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url can't be parsed: {error}") from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"url must start with redis://, rediss:// or unix://, not {parts.scheme!r}")
        if parts.scheme != "unix" and (not parts.hostname or port == 0):
            raise ValueError("url names no host or port 0")
        if parts.scheme != "rediss" and (self.tls_ca or self.tls_cert or self.tls_key):
            raise ValueError("tls_ca, tls_cert and tls_key need a rediss:// url")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self

    @property
    def shown(self) -> str:
        """The address without user and password, for logs."""
        if self.url is None:
            return "embedded"
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


class ServiceSettings(Settings):
    """An HTTP service: address, key and limits.

    Without ``api_key`` only a loopback ``host`` is accepted. ``port`` 0 takes a free one.
    """

    section: ClassVar[str] = "service"

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: str | None = Field(default=None, repr=False, pattern=r"^[\x21-\x7e]{8,512}$")
    replicas: Positive = 1
    max_request_bytes: Positive = 64 << 20
    max_batch_items: Positive = 64
    max_queued_requests: Positive = 256
    request_timeout_s: Seconds = 120.0
    drain_timeout_s: Seconds = 30.0

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches ``host``."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _key_beyond_loopback(self) -> ServiceSettings:
        if not self.loopback and self.api_key is None:
            raise ValueError(
                f"host {self.host!r} is reachable from other machines, so api_key is required: "
                "set ERNIE_MULTI_SERVICE_API_KEY"
            )
        return self


class StreamSettings(Settings):
    """The token stream of one run.

    Producers wait while more than ``high_water`` published samples are unconsumed; above ``entry_mark``
    entries that no checkpoint covers yet, a checkpoint is forced. A segment that failed ``max_attempts``
    times, or whose worker was silent for ``claim_idle_ms`` that often, goes to the dead letters.
    """

    section: ClassVar[str] = "stream"

    run: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    high_water: Positive = 512
    entry_mark: Positive = 4096
    max_attempts: Positive = 3
    claim_idle_ms: Positive = 30_000
    batch_size: Positive = 32
    block_ms: Positive = 500

    @model_validator(mode="after")
    def _marks_in_order(self) -> StreamSettings:
        if self.entry_mark <= self.high_water:
            raise ValueError(f"entry_mark {self.entry_mark} must be above high_water {self.high_water}")
        return self
