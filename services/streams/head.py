"""The head of a sample: what the trainer needs beside the spans, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ernie5.protocol.errors import InvalidInputError, WireError
from ernie5.protocol.samples import Role, Sample

MAX_HEAD_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Head:
    """Identity, roles of the segments in order, and free metadata."""

    sample_id: str
    roles: tuple[Role, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def write_head(sample: Sample, sample_id: str) -> bytes:
    """JSON of a sample's head.

    Raises:
        InvalidInputError: metadata that JSON can't carry, or above the limit.
    """
    try:
        text = json.dumps(
            {
                "sample_id": sample_id,
                "roles": [segment.role for segment in sample.segments],
                "metadata": dict(sample.metadata),
            },
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"sample metadata can't be written as JSON: {error}", param="metadata"
        ) from None
    if len(text) > MAX_HEAD_BYTES:
        raise InvalidInputError(
            f"sample metadata takes {len(text)} bytes, above the limit {MAX_HEAD_BYTES}", param="metadata"
        )
    return text


def bare_head(sample_id: str, metadata: Mapping[str, Any]) -> bytes:
    """The head of a sample that could not be read."""
    return json.dumps({"sample_id": sample_id, "roles": [], "metadata": dict(metadata)}, default=str).encode()


def read_head(data: bytes) -> Head:
    """The head in ``data``; ``WireError`` when it is none."""
    try:
        value = json.loads(data)
        roles = tuple(value["roles"])
        if any(role not in ("context", "target") for role in roles):
            raise ValueError(f"roles {roles}")
        return Head(str(value["sample_id"]), roles, dict(value["metadata"]))
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"damaged head of a sample: {error}") from None
