"""What producers, workers and the trainer share: the connection, the keys and the scripts of one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
from redis.exceptions import ResponseError

from ernie5.protocol.errors import InvalidInputError, TokenizerMismatchError
from ernie5.services import scripts
from ernie5.services.cache import CACHE_PREFIX, DEFAULT_CACHE_BYTES, SpanCache
from ernie5.services.redis_client import unavailable_on_loss
from ernie5.services.streams.head import read_head
from ernie5.services.streams.keys import GROUP, SERVICES, DeadLetter, Failure, RunKeys

# Scripts that free memory or let others do so run on a full server too.
_SCRIPTS = {
    "add": False,
    "complete": True,
    "fail": True,
    "position": True,
    "probe": True,
    "cursor": True,
    "evict": True,
    "group": True,
}


class RunStream:
    """One run's streams on one Redis.

    ``client`` comes from :func:`ernie5.services.redis_client.connect`; all methods are safe to call from
    several threads, and raise ``UnavailableError`` when Redis does not answer.
    """

    def __init__(
        self, client: redis.Redis[bytes], run: str, *, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> None:
        if cache_bytes < 0:
            raise InvalidInputError(f"cache_bytes {cache_bytes} is negative", param="cache_bytes")
        self.client = client
        self.keys = RunKeys(run)
        self.cache_bytes = cache_bytes
        self.cache = SpanCache(client)
        self._scripts = {
            name: client.register_script(scripts.source(name, allow_oom=allow_oom))
            for name, allow_oom in _SCRIPTS.items()
        }

    @unavailable_on_loss
    def _run_script(self, name: str, *arguments: Any) -> Any:
        return self._scripts[name](args=[self.keys.run, CACHE_PREFIX, *arguments])

    # -- tokenizers of the run ---------------------------------------------------------------------

    @unavailable_on_loss
    def register_tokenizer(
        self, modality: str, tokenizer: str, variant: str, *, replace: bool = False
    ) -> None:
        """Make known which tokenizer (hash) and variant this run uses for a modality.

        Raises:
            TokenizerMismatchError: the run uses another one already; mixing would make its order of tokens
            depend on
                which replica was faster.
        """
        name, value = self.keys.named("tokenizers"), f"{tokenizer}:{variant}"
        if replace:
            self.client.hset(name, modality, value)
            return
        # Looked up first: a full server refuses even a write that changes nothing.
        known = (self.client.hget(name, modality) or b"").decode()
        if not known:
            self.client.hsetnx(name, modality, value)
            known = (self.client.hget(name, modality) or value.encode()).decode()
        if known != value:
            raise TokenizerMismatchError(
                f"run {self.keys.run!r} uses the {modality} tokenizer {known}, not {value}; start the same "
                "tokenizer (weights, device kind, dtype, dropout) on every replica, or a run of another name",
                param=modality,
            )

    @unavailable_on_loss
    def tokenizers(self) -> dict[str, str]:
        """``hash:variant`` of each modality's tokenizer that this run uses."""
        found = self.client.hgetall(self.keys.named("tokenizers"))
        return {modality.decode(): value.decode() for modality, value in found.items()}

    # -- the corpus --------------------------------------------------------------------------------

    @unavailable_on_loss
    def register_corpus(self, length: int, seed: int, name: str = "") -> None:
        """Make known what is walked; ``InvalidInputError`` when the run walks something else already."""
        if length < 1:
            raise InvalidInputError("the corpus is empty", param="length")
        key, wanted = self.keys.named("corpus"), {"length": str(length), "seed": str(seed), "name": name}
        known = self.corpus()
        if known is None:
            pipe = self.client.pipeline(transaction=False)
            for field, value in wanted.items():
                pipe.hsetnx(key, field, value)
            pipe.execute()
            known = self.corpus()
        if known is not None and known != wanted:
            raise InvalidInputError(
                f"run {self.keys.run!r} walks {known}, not {wanted}; give the same corpus and seed, "
                "or another run name",
                param="corpus",
            )

    @unavailable_on_loss
    def corpus(self) -> Mapping[str, str] | None:
        """``length``, ``seed``, ``name`` of what the run walks; None while no ingest has come."""
        found = self.client.hgetall(self.keys.named("corpus"))
        return {field.decode(): value.decode() for field, value in found.items()} or None

    # -- looking in --------------------------------------------------------------------------------

    @unavailable_on_loss
    def dead_letters(self, count: int = 100) -> list[DeadLetter]:
        """The newest dead letters, newest first."""
        letters = []
        for entry_id, fields in self.client.xrevrange(self.keys.dead, count=count):
            head = read_head(fields[b"h"])
            letters.append(
                DeadLetter(
                    entry_id.decode(),
                    int(fields[b"o"]),
                    head.sample_id,
                    Failure.from_json(fields[b"f"]),
                    head.metadata,
                )
            )
        return letters

    @unavailable_on_loss
    def stats(self) -> dict[str, Any]:
        """Figures for status pages and metrics.

        ``lag`` samples added and not consumed; ``untrimmed`` samples that Redis still holds; ``work``
        entries and ``pending`` ones by service; ``consumers``; ``dead``; the counters ``added``,
        ``published``, ``completed``, ``cached_segments``, ``tombstones``, ``retries``, ``repaired``,
        ``evicted``; ``cache_bytes``, ``used_memory``.
        """
        pipe = self.client.pipeline(transaction=False)
        pipe.hgetall(self.keys.position)
        pipe.hget(self.keys.named("ingest"), "cursor")
        pipe.zcard(self.keys.named("open"))
        pipe.xlen(self.keys.tokens)
        pipe.xlen(self.keys.dead)
        pipe.hgetall(self.keys.named("counters"))
        pipe.get(f"{CACHE_PREFIX}:bytes")
        pipe.info("memory")
        for service in SERVICES:
            pipe.xlen(self.keys.work(service))
            pipe.execute_command("XINFO GROUPS", self.keys.work(service))
        answers = pipe.execute(raise_on_error=False)
        for answer in answers[:8]:
            if isinstance(answer, Exception):
                raise answer
        position, cursor, untrimmed, tokens, dead, counters, cache_bytes, memory = answers[:8]
        consumed = int(position.get(b"consumed", 0))
        added = int(cursor or 0)
        work, pending, consumers = {}, {}, {}
        for place, service in enumerate(SERVICES):
            length, groups = answers[8 + 2 * place : 10 + 2 * place]
            work[service] = length if isinstance(length, int) else 0
            ours = (
                []
                if isinstance(groups, ResponseError)
                else [g for g in groups if g["name"] == GROUP.encode()]
            )
            pending[service] = ours[0]["pending"] if ours else 0
            consumers[service] = ours[0]["consumers"] if ours else 0
        names = (
            "added",
            "published",
            "completed",
            "cached_segments",
            "tombstones",
            "retries",
            "repaired",
            "evicted",
        )
        return {
            "cursor": added,
            "consumed": consumed,
            "covered": int(position.get(b"covered", 0)),
            "lag": max(added - consumed, 0),
            "untrimmed": untrimmed,
            "tokens": tokens,
            "work": work,
            "pending": pending,
            "consumers": consumers,
            "dead": dead,
            **{name: int(counters.get(name.encode(), 0)) for name in names},
            "cache_bytes": int(cache_bytes or 0),
            "used_memory": int(memory["used_memory"]),
        }

    @unavailable_on_loss
    def delete_run(self) -> int:
        """Remove all keys of this run (the shared cache stays); the number removed."""
        removed = 0
        for name in self.client.scan_iter(match=f"{self.keys.run}:*", count=1000):
            removed += self.client.delete(name)
        return removed
