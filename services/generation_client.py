"""The gateway's side of the ``requests`` stream: submit, follow, cancel."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import RedisError

from ernie5.protocol.errors import UnavailableError
from ernie5.protocol.generation import DoneEvent, ErrorEvent, Event, Request
from ernie5.protocol.service_settings import RedisSettings
from ernie5.services import generation_stream as wire
from ernie5.services.redis_client import connect

_TICK_S = 0.5
# A worker that dies is replaced by another one within seconds; until then nobody may be announced.
_NO_WORKER_GRACE_S = 20.0
_READ_KEEP_S = 30


def connect_async(settings: RedisSettings) -> aioredis.Redis:
    """An asynchronous client with the address, login and TLS of :func:`redis_client.connect`."""
    pool = connect(settings, check=False).connection_pool
    kinds = {
        "Connection": aioredis.Connection,
        "SSLConnection": aioredis.SSLConnection,
        "UnixDomainSocketConnection": aioredis.UnixDomainSocketConnection,
    }
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name
        in (
            "host",
            "port",
            "path",
            "db",
            "username",
            "password",
            "protocol",
            "decode_responses",
            "socket_connect_timeout",
            "socket_timeout",
            "health_check_interval",
        )
        or name.startswith("ssl_")
    }
    kind = kinds[pool.connection_class.__name__]
    own = aioredis.ConnectionPool(
        connection_class=kind,
        # Each answer that is waited for holds a connection; the gateway bounds these itself.
        max_connections=4096,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 3),
        **options,
    )
    return aioredis.Redis(connection_pool=own)


class GenerationClient:
    """Puts requests on the stream and follows their answers."""

    def __init__(self, redis: aioredis.Redis, max_queued: int, idle_timeout_s: float) -> None:
        self._redis, self._max_queued, self._idle_timeout_s = redis, max_queued, idle_timeout_s

    async def workers(self) -> list[wire.WorkerInfo]:
        """The workers that are alive; ``UnavailableError`` when Redis isn't."""
        found = await _answer(self._redis.eval(wire.WORKERS_ALIVE, 2, wire.WORKERS, wire.WORKERS_INFO))
        return [wire.WorkerInfo.from_json(info) for info in found]

    async def submit(self, request: Request) -> None:
        """Add a request.

        Raises:
            UnavailableError: as many requests as may wait are waiting, or Redis does not answer.
        """
        waiting = await _answer(self._redis.xlen(wire.REQUESTS))
        if waiting >= self._max_queued:
            raise UnavailableError(
                f"{waiting} requests wait already (limit {self._max_queued}); try again shortly"
            )
        await _answer(self._redis.xadd(wire.REQUESTS, cast(Any, wire.request_fields(request))))

    async def events(self, request_id: str) -> AsyncGenerator[Event | None]:
        """The events of an answer as they come, to its end; None about twice a second while there are none.

        Raises:
            UnavailableError: no progress for too long, no worker, or Redis does not answer.
        """
        last: bytes | str = "0-0"
        key = wire.reply_key(request_id)
        progress = seen_worker = time.monotonic()
        while True:
            answer = await _answer(self._redis.xread({key: last}, count=256, block=int(_TICK_S * 1000)))
            now = time.monotonic()
            if not answer:
                if await self.workers():
                    seen_worker = now
                elif now - seen_worker > _NO_WORKER_GRACE_S:
                    raise UnavailableError("no inference worker is running any more")
                if now - progress > self._idle_timeout_s:
                    raise UnavailableError(f"no progress for {self._idle_timeout_s:g} s")
                yield None
                continue
            progress = seen_worker = now
            for entry, fields in answer[0][1]:
                last = entry
                event = wire.read_event(request_id, fields)
                yield event
                if isinstance(event, (DoneEvent, ErrorEvent)):
                    # The worker may look at its end once more; then it is in nobody's way.
                    await _answer(self._redis.expire(key, _READ_KEEP_S))
                    return

    async def cancel(self, request_id: str) -> None:
        """Tell the workers that nobody waits for this answer any more; never raises."""
        try:
            await self._redis.set(wire.cancel_key(request_id), b"1", ex=600)
        except (RedisError, OSError):
            return


async def _answer(call: Awaitable[Any] | Any) -> Any:
    try:
        return await call
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis is not answering: {type(error).__name__}") from error
