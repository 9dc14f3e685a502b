"""Connections to Redis (7 or later) or Valkey: password, TLS, retries with backoff, one clear error.

The stream speaks to one primary (with or without replicas or Sentinel in front). Redis Cluster is not
supported: the scripts touch keys of a run and of the shared cache together.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from ernie5.protocol.errors import InvalidInputError, UnavailableError
from ernie5.protocol.service_settings import RedisSettings
from ernie5.protocol.settings import load_settings

OLDEST = (7, 0)  # shebang flags of scripts, three-element XAUTOCLAIM answers

P = ParamSpec("P")
R = TypeVar("R")


class StreamFullError(UnavailableError):
    """Redis is at ``maxmemory``; consumers or a checkpoint free it."""

    type = "stream_full"


def connect(
    target: str | RedisSettings | None = None, *, check: bool = True, **overrides: Any
) -> redis.Redis[bytes]:
    """A thread-safe client that answers bytes.

    ``target`` is a URL, settings, or None for the environment (``REDIS_URL``, ``REDIS_PASSWORD``,
    ``ERNIE_MULTI_REDIS_…``); ``overrides`` are fields of :class:`RedisSettings`. Connections are made on
    demand and again after a loss. With ``check`` the server must answer now.

    Raises:
        InvalidInputError: no address, or a URL or TLS file that can't be used.
        UnavailableError: the server doesn't answer, refuses the password, or is too old.
    """
    given: dict[str, Any] = dict(overrides)
    if isinstance(target, RedisSettings):
        given = {**target.model_dump(exclude_unset=True), **given}
        settings = load_settings(RedisSettings, overrides=given, environ={})
    else:
        if target is not None:
            given["url"] = target
        # The environment's password belongs to the environment's address, so a given URL leaves both alone.
        settings = load_settings(RedisSettings, overrides=given, environ={} if target else os.environ)
    if settings.url is None:
        raise InvalidInputError("no Redis address: set REDIS_URL or start an embedded server", param="url")
    options: dict[str, Any] = {
        "decode_responses": False,
        "protocol": 2,  # one shape of answers, whatever the client library's default
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": settings.timeout_s,
        "socket_keepalive": True,
        "health_check_interval": 30,
        "max_connections": settings.max_connections,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), settings.retries),
        "retry_on_error": [BusyLoadingError, ConnectionError, TimeoutError],
    }
    if settings.url.startswith("unix://"):
        options.pop("socket_keepalive")
    if settings.password is not None:
        options["password"] = settings.password
    if settings.url.startswith("rediss://"):
        options["ssl_cert_reqs"] = "required"
        options["ssl_check_hostname"] = settings.tls_check_hostname
        for option, path in (
            ("ssl_ca_certs", settings.tls_ca),
            ("ssl_certfile", settings.tls_cert),
            ("ssl_keyfile", settings.tls_key),
        ):
            if path is None:
                continue
            if not path.is_file():
                raise InvalidInputError(f"TLS file {path} does not exist", param=option)
            options[option] = str(path)
    try:
        client = redis.Redis.from_url(settings.url, **options)
    except (ValueError, TypeError) as error:
        raise InvalidInputError(
            f"Redis address {settings.shown} can't be used: {error}", param="url"
        ) from None
    if settings.password is not None:
        # A password inside the URL would win over the option; the setting is documented to win.
        client.connection_pool.connection_kwargs["password"] = settings.password
    if check:
        check_server(client, settings.shown)
    return client


def check_server(client: redis.Redis[bytes], shown: str = "Redis") -> str:
    """The server's version, after an answer; ``UnavailableError`` says why there is none."""
    try:
        version = str(client.info("server").get("redis_version", "0"))
    except (AuthenticationError, NoPermissionError) as error:
        raise UnavailableError(f"Redis at {shown} refused the login: {error}", param="password") from None
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis at {shown} can't be reached: {error}", param="url") from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise UnavailableError(f"Redis at {shown} is version {version}; 7.0 or later is needed", param="url")
    return version


def unavailable_on_loss(call: Callable[P, R]) -> Callable[P, R]:
    """Turns losses of the connection into ``UnavailableError`` and a full server into ``StreamFullError``."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (ConnectionError, TimeoutError, BusyLoadingError, OSError) as error:
            raise UnavailableError(f"Redis is not answering: {error}") from error
        except OutOfMemoryError as error:
            raise StreamFullError(f"Redis is out of memory: {error}") from error
        except ResponseError as error:
            text = str(error)
            if "OOM" in text:
                raise StreamFullError(f"Redis is out of memory: {error}") from error
            if text.startswith(("LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN", "UNBLOCKED")):
                raise UnavailableError(f"Redis is not ready: {error}") from error
            raise

    return wrapped
