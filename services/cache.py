"""The content-addressed cache of token spans.

A span lies under ``cache:{media hash}:{tokenizer hash}:{variant}`` (the tokenizer's hash knows weights,
device kind and dtype) once, whatever number of samples refer to it; assembled samples carry names. Text that
is cut anew for each sample (BPE-dropout) has the sample's ordinal in the name too. All runs on one Redis
share it. ``cache:lru`` sorts the names by last use, ``cache:bytes`` counts; the scripts that
add and complete keep both, and evict the least recently used above the limit, sparing what samples on their
way may refer to. Should one go missing all the same, the trainer's feed has its sample made again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import redis

from ernie5.protocol.errors import WireError
from ernie5.protocol.tokens import TokenSpan
from ernie5.protocol.wire import decode_span
from ernie5.services.redis_client import unavailable_on_loss

if TYPE_CHECKING:
    from ernie5.tokenizers.text.dropout import BpeDropout

logger = logging.getLogger(__name__)

CACHE_PREFIX = "cache"
DEFAULT_CACHE_BYTES = 256 << 20


_DRAWN = "~"


def span_cache_key(media_hash: str, tokenizer: str, variant: str, ordinal: int) -> str:
    """Name of a cached span; ``variant`` as :func:`variant_of` gives it.

    ``ordinal`` is that of the sample; it counts for drawn variants only.
    """
    return f"{media_hash}:{tokenizer}:{variant}" + (f"@{ordinal}" if _DRAWN in variant else "")


def variant_of(*, features: bool, latent: bool, dropout: BpeDropout | None = None) -> str:
    """What a span carries beside its codes: ``f`` features, ``l`` the latent, ``-`` neither.

    With ``dropout`` its rate and seed follow (``-~0.1~7``): such spans differ from sample to sample.
    """
    carried = ("f" if features else "") + ("l" if latent else "") or "-"
    if dropout is None:
        return carried
    return f"{carried}{_DRAWN}{float(dropout.rate)!r}{_DRAWN}{dropout.seed}"


class SpanCache:
    """Reads the cache; what is decoded is also kept in memory, up to ``decoded_bytes`` of wire size."""

    def __init__(self, client: redis.Redis, decoded_bytes: int = 0) -> None:
        self._client = client
        self._limit = decoded_bytes
        self._bytes = 0
        self._decoded: OrderedDict[str, tuple[TokenSpan, int]] = OrderedDict()

    @unavailable_on_loss
    def present(self, names: Iterable[str]) -> set[str]:
        """Those of the names whose spans are there; one round trip."""
        asked = sorted({name for name in names if name})
        if not asked:
            return set()
        pipe = self._client.pipeline(transaction=False)
        for name in asked:
            pipe.exists(f"{CACHE_PREFIX}:{name}")
        return {name for name, found in zip(asked, pipe.execute(), strict=True) if found}

    @unavailable_on_loss
    def fetch(self, names: Iterable[str]) -> dict[str, TokenSpan]:
        """The spans that are there; one round trip. A damaged one is removed from Redis and left out."""
        found: dict[str, TokenSpan] = {}
        missing = []
        for name in sorted(set(names)):
            if name in self._decoded:
                self._decoded.move_to_end(name)
                found[name] = self._decoded[name][0]
            else:
                missing.append(name)
        if not missing:
            return found
        values = self._client.mget([f"{CACHE_PREFIX}:{name}" for name in missing])
        for name, value in zip(missing, values, strict=True):
            if value is None:
                continue
            try:
                span = decode_span(value)
            except WireError as error:
                logger.error("cached span %s is damaged and removed: %s", name, error)
                self._client.delete(f"{CACHE_PREFIX}:{name}")
                continue
            found[name] = span
            self._decoded[name] = (span, len(value))
            self._bytes += len(value)
        while self._bytes > self._limit and self._decoded:
            _, (_, size) = self._decoded.popitem(last=False)
            self._bytes -= size
        return found
