"""What a training run waits for and reads on its stream: tokenizers, the corpus's length, samples."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ernie5.protocol.errors import UnavailableError
from ernie5.protocol.modalities import modality_of

if TYPE_CHECKING:
    from ernie5.services.streams import RunStream, TokenFeed

_PEERS_S = 180.0


def wait_for_tokenizers(
    stream: RunStream, check: Callable[[], None] = lambda: None, timeout_s: float = _PEERS_S
) -> dict[str, str]:
    """Service name to tokenizer hash, once all three services have joined the run.

    Raises:
        UnavailableError: one did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        hashes: dict[str, str] = {}
        for modality, value in stream.tokenizers().items():
            hashes[modality_of(modality).service] = value.partition(":")[0]
        missing = {"text", "audio", "vision"} - hashes.keys()
        if not missing:
            return hashes
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"no {', '.join(sorted(missing))} tokenizer service has joined run {stream.keys.run!r} "
                f"within {timeout_s:.0f} s; start them with `ernie-multi service`, the same run and REDIS_URL"
            )
        check()
        time.sleep(0.1)


def corpus_length(stream: RunStream, check: Callable[[], None], timeout_s: float = _PEERS_S) -> int:
    """Samples of an epoch, once ingest has joined the run.

    Raises:
        UnavailableError: it did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while (known := stream.corpus()) is None:
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"no ingest has joined run {stream.keys.run!r} within {timeout_s:.0f} s; start one with "
                "`ernie-multi service ingest`"
            )
        check()
        time.sleep(0.1)
    return int(known["length"])


def samples_of(
    feed: TokenFeed, length: int, skipped: Counter[str], check: Callable[[], None]
) -> Iterator[tuple[int, Any]]:
    """The feed as the trainer reads it: (ordinal, sequence), None for a tombstone.

    ``check`` is called each time that nothing has come for a while; what it raises ends the run.
    """
    from ernie5.services.streams import Tombstone

    while True:
        try:
            item = feed.next()
        except UnavailableError:
            check()
            continue
        if item is None:
            return
        position, value = item
        if isinstance(value, Tombstone):
            skipped[value.failure.message] += 1
            yield position.ordinal(length), None
        else:
            yield position.ordinal(length), value
