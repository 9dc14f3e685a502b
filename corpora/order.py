"""The order in which an epoch visits a corpus: a pure function of (seed, epoch, position, length).

A balanced Feistel network permutes ``[0, 4**k)``, the smallest such range that holds the corpus; positions
that fall outside walk on until they land inside (cycle walking; Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", 2002), which keeps it a bijection. So any position is found at once, nothing is
stored, and no library version changes the order.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

ROUNDS = 8
_MIN_HALF_BITS = 3


@lru_cache(maxsize=256)
def _round_keys(seed: int, epoch: int, length: int) -> tuple[bytes, ...]:
    material = f"{seed}|{epoch}|{length}".encode()
    return tuple(
        hashlib.blake2b(material, digest_size=16, salt=bytes([number])).digest() for number in range(ROUNDS)
    )


def position_to_index(seed: int, epoch: int, position: int, length: int) -> int:
    """The index of the sample at ``position`` of an epoch; a bijection on ``[0, length)`` in ``position``.

    Args:
        seed: any integer; another seed gives another order.
        epoch: from 0; each epoch has its own order.
        position: place in the epoch, in ``[0, length)``.
        length: number of samples.

    Raises:
        ValueError: ``position`` lies outside the epoch, or ``epoch`` is negative.
    """
    if not 0 <= position < length:
        raise ValueError(f"position {position} lies outside an epoch of {length} samples")
    if epoch < 0:
        raise ValueError(f"epoch {epoch} is negative")
    half_bits = max(_MIN_HALF_BITS, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    width = (half_bits + 7) // 8
    keys = _round_keys(seed, epoch, length)
    index = position
    while True:
        left, right = index >> half_bits, index & mask
        for key in keys:
            digest = hashlib.blake2b(right.to_bytes(width, "little"), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half_bits | right
        if index < length:
            return index
