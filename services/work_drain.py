"""A replica's background thread that drains the work stream of a run.

The thread shares the tokenizer with the replica's HTTP requests. When Redis goes away it keeps trying: HTTP
goes on meanwhile, and ``/ready`` tells what the drain is at.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from typing import TYPE_CHECKING, Any, cast

from ernie5.protocol.errors import ErnieMultiError
from ernie5.protocol.modalities import ServiceName
from ernie5.services.tokenizer_settings import TokenizerServiceSettings
from ernie5.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from ernie5.services.streams import WorkQueue
    from ernie5.services.worker import DrainMetrics
    from ernie5.tokenizers.text.dropout import BpeDropout

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_LOOK_TIMEOUT_S = 2.0


class WorkDrain:
    """Drains ``{run}:work:{service}`` between ``start`` and ``stop``; idle where no run or Redis is named."""

    def __init__(self, service: str, tokenizer: Tokenizer, settings: TokenizerServiceSettings) -> None:
        self._service, self._tokenizer, self._settings = service, tokenizer, settings
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._status = "off"
        self._counts: dict[str, Any] = {}
        self._looking: WorkQueue | None = None

    @property
    def enabled(self) -> bool:
        return self._settings.run is not None and self._settings.redis.url is not None

    def start(self) -> None:
        """Start the thread, where there is a stream to drain."""
        if not self.enabled:
            return
        self._thread = threading.Thread(target=self._run, name=f"work-{self._service}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the batch at hand and wait for the thread; what isn't acknowledged is delivered again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._settings.drain_timeout_s)

    def state(self) -> dict[str, Any]:
        """For ``/ready``: the run, what the thread is at, and what it has counted."""
        if not self.enabled:
            return {"work": {"status": "off"}}
        return {"work": {"run": self._settings.run, "status": self._status, **self._counts}}

    async def load(self) -> dict[str, float]:
        """For Ray Serve's controller: the unsettled entries of the stream, ``{"work_entries": n}``.

        Without a stream there are none; empty while Redis does not answer, so that the lag counts as unknown.
        """
        from ernie5.services.stream_scaling import LAG_METRIC

        if not self.enabled:
            return {LAG_METRIC: 0.0}
        try:
            return {LAG_METRIC: float(await asyncio.to_thread(self._waiting))}
        except ErnieMultiError as error:
            logger.warning("the lag of %s is unknown: %s", self._service, error)
            return {}

    def _waiting(self) -> int:
        from ernie5.services.redis_client import connect
        from ernie5.services.streams import WorkQueue

        if self._looking is None:
            # A connection of its own: the draining thread's may wait for Redis much longer.
            client = connect(self._settings.redis, check=False, timeout_s=_LOOK_TIMEOUT_S, retries=0)
            self._looking = WorkQueue(client, self._settings.run or "")
        return self._looking.waiting(cast(ServiceName, self._service))

    def _run(self) -> None:
        # Here, because a service without a run needs neither Redis nor its client.
        from ernie5.services.redis_client import connect
        from ernie5.services.streams import TokenStream
        from ernie5.services.worker import drain

        settings = self._settings
        while not self._stop.is_set():
            try:
                stream = TokenStream(connect(settings.redis), settings.run or "")
                self._status = "draining"
                drain(
                    self._tokenizer,
                    stream,
                    self._stop,
                    settings.work_batch_size,
                    self._count,
                    latent=settings.work_latent,
                    dropout=self._dropout(),
                )
            except ErnieMultiError as error:
                self._status = f"waiting: {error}"
                logger.warning("work stream of %s: %s; trying again", self._service, error)
            except Exception:
                self._status = "failed; trying again"
                logger.exception("draining the work stream of %s failed; trying again", self._service)
            self._stop.wait(_RETRY_S)
        self._status = "stopped"

    def _dropout(self) -> BpeDropout | None:
        """How training's text is cut; HTTP requests of the same replica never are."""
        pool = self._settings.text
        if self._service != "text" or not pool.dropout:
            return None
        from ernie5.tokenizers.text.dropout import BpeDropout

        return BpeDropout(pool.dropout, pool.dropout_seed)

    def _count(self, metrics: DrainMetrics) -> None:
        self._counts = dataclasses.asdict(metrics)
