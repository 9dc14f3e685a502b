"""Malformed files that exist for real, if `ernie-multi corpus build hostile` has fetched them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ernie5.corpora.builders.hostile import SETS, hostile_files
from ernie5.protocol.errors import InvalidInputError
from tests.tokenizers.hostile.worker import Reply

pytestmark = pytest.mark.slow

Tokenise = Callable[..., Reply]
# Set to the modalities that its files are sent as.
SENT_AS = {
    "pictures": ("image", "sketch"),
    "sounds": ("sound",),
    "containers": ("image", "sound", "video", "text"),
    "wav": ("speech", "series"),
}
# A picture of 64 million pixels and its RGBA copies are allowed.
LARGE = 2 << 30


@pytest.fixture(scope="module")
def files() -> dict[str, list[Path]]:
    try:
        return hostile_files()
    except InvalidInputError as error:
        pytest.skip(error.message)


@pytest.mark.parametrize(("name", "modality"), [(name, each) for name in SETS for each in SENT_AS[name]])
def test_each_file_gives_tokens_or_a_reason(
    tokenise: Tokenise, files: dict[str, list[Path]], name: str, modality: str
) -> None:
    outcomes: Counter[str] = Counter()
    slowest, largest = (0.0, ""), (0, "")
    for path in files[name]:
        reply = tokenise(modality, path.read_bytes(), peak=LARGE)
        outcomes[reply.error or "tokens"] += 1
        slowest = max(slowest, (reply.seconds, path.name))
        largest = max(largest, (reply.peak, path.name))
    print(
        f"{name} as {modality}: {sum(outcomes.values())} files, {dict(outcomes.most_common())}; "
        f"slowest {slowest[0]:.1f} s ({slowest[1]}), most memory {largest[0] >> 20} MiB ({largest[1]})"
    )
    assert outcomes.total() == len(files[name])
