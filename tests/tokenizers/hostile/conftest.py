"""One worker for each service, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ernie5.protocol.modalities import MODALITIES
from tests.tokenizers.hostile.worker import Reply, Worker

# An item of these tests is small, whatever its header says.
PEAK_LIMIT = 400 << 20


@pytest.fixture(scope="session")
def workers() -> Iterator[dict[str, Worker]]:
    started: dict[str, Worker] = {}
    yield started
    for worker in started.values():
        worker.close()


@pytest.fixture
def tokenise(workers: dict[str, Worker]) -> Callable[..., Reply]:
    """Tokenise a file in its service's worker: tokens, or a reason that the sender can act on.

    Anything else fails the test: a dead worker, one that hangs or grows, an error without a reason, or one
    that blames this program.
    """

    def send(modality: str, data: bytes, content_type: str | None = None, *, peak: int = PEAK_LIMIT) -> Reply:
        service = MODALITIES[modality].service
        if service not in workers:
            workers[service] = Worker(service)
        try:
            reply = workers[service].tokenise(modality, data, content_type)
        except AssertionError:
            workers.pop(service).close()
            raise
        assert reply.peak <= peak, f"{reply.peak >> 20} MiB more for {len(data)} bytes: {reply}"
        if reply.outcome == "refused":
            assert 400 <= reply.status < 500 and reply.message, reply
        return reply

    return send
