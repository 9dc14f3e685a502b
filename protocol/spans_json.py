"""Token spans as plain JSON values, and the strict reading that the wire's heads share.

JSON is what a person with curl sees: codes are integer lists, features and latent base64 of little-endian
float16 (only where asked, for they outweigh the codes a hundredfold). Reading accepts exactly the fields that
writing produces, each of exactly its type, and raises :class:`~ernie5.protocol.errors.WireError` naming the
path of what is wrong.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ernie5.protocol.errors import WireError
from ernie5.protocol.tokens import (
    MAX_CODES,
    CodebooksLayout,
    Layout,
    ResizePad,
    ScalesLayout,
    SequenceLayout,
    TokenSpan,
)

MAX_JSON_DEPTH = 32
CODE_DTYPES: dict[str, np.dtype] = {
    "sequence": np.dtype(np.int32),
    "scales": np.dtype(np.uint32),
    "codebooks": np.dtype(np.int16),
}
_RESIZE_FIELDS = tuple(ResizePad.__dataclass_fields__)
_NUMBER = (int, float)


def plain_json(value: Any, where: str, depth: int = MAX_JSON_DEPTH) -> Any:
    """``value`` as plain dicts, lists, strings and finite numbers; tuples become lists.

    Raises:
        WireError: a value JSON can't carry unchanged (NaN, a non-string key, an integer beyond 64 bits,
            an object, invalid Unicode, nesting below ``MAX_JSON_DEPTH``), with its path.
    """
    if depth == 0:
        raise WireError(f"{where} nests deeper than {MAX_JSON_DEPTH} levels", param=where)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise WireError(f"{where} is not valid Unicode: {value[:40]!r}", param=where) from None
        return str(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise WireError(f"{where} is an integer beyond 64 bits", param=where)
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise WireError(f"{where} is {value}; JSON has finite numbers only", param=where)
        return float(value)
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise WireError(f"{where} has the key {key!r}; keys must be strings", param=where)
            if not _is_plain(key):
                plain_json(key, f"a key of {where}")
            plain[str(key)] = (
                item if depth > 1 and _is_plain(item) else plain_json(item, f"{where}.{key}", depth - 1)
            )
        return plain
    if isinstance(value, (list, tuple)):
        return [
            item if depth > 1 and _is_plain(item) else plain_json(item, f"{where}[{index}]", depth - 1)
            for index, item in enumerate(value)
        ]
    raise WireError(f"{where} is a {type(value).__name__}, which JSON can't carry", param=where)


def _is_plain(value: Any) -> bool:
    """Whether it is one of the usual values, told by its exact type: these need no path and no call."""
    kind = type(value)
    if kind is str:
        return value.isascii()
    return value is None or kind is bool or (kind is int and -(2**63) <= value < 2**64)


def read_fields(
    value: Any, where: str, required: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The dict ``value``, with exactly the named fields, each of exactly its type (or one of a tuple)."""
    if type(value) is not dict:
        raise WireError(f"{where} must be an object, got {type(value).__name__}", param=where)
    types = {**required, **(optional or {})}
    for name in value:
        if name not in types:
            raise WireError(f"{where} has the unknown field {name!r}; known: {', '.join(types)}", param=where)
    for name in required:
        if name not in value:
            raise WireError(f"{where} lacks the field {name!r}", param=f"{where}.{name}")
    for name, item in value.items():
        allowed = types[name] if isinstance(types[name], tuple) else (types[name],)
        if type(item) not in allowed:
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
            raise WireError(
                f"{where}.{name} must be {names}, got {type(item).__name__}", param=f"{where}.{name}"
            )
    return value


def read_integers(value: Any, where: str, count: int | None = None) -> list[int]:
    """A list of integers (of ``count`` entries, where given)."""
    if type(value) is not list or not all(type(item) is int for item in value):
        raise WireError(f"{where} must be a list of integers", param=where)
    if count is not None and len(value) != count:
        raise WireError(f"{where} must hold {count} integers, got {len(value)}", param=where)
    return value


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """The layout's fields with its ``kind``."""
    if isinstance(layout, SequenceLayout):
        return {"kind": "sequence", "vocabulary_size": int(layout.vocabulary_size)}
    if isinstance(layout, ScalesLayout):
        transform = layout.transform
        return {
            "kind": "scales",
            "bits": int(layout.bits),
            "schedule": [[int(height), int(width)] for height, width in layout.schedule],
            "frames": int(layout.frames),
            "transform": None
            if transform is None
            else {name: int(getattr(transform, name)) for name in _RESIZE_FIELDS},
        }
    return {
        "kind": "codebooks",
        "codebook_size": int(layout.codebook_size),
        "levels": int(layout.levels),
        "frame_rate": float(layout.frame_rate),
        "sample_rate": float(layout.sample_rate),
        "samples": int(layout.samples),
        "channels": int(layout.channels),
    }


def layout_from_json(value: Any, where: str = "layout") -> Layout:
    """The layout that :func:`layout_to_json` described; ``WireError`` for anything else."""
    kind = value.get("kind") if type(value) is dict else None
    try:
        if kind == "sequence":
            fields = read_fields(value, where, {"kind": str, "vocabulary_size": int})
            return SequenceLayout(fields["vocabulary_size"])
        if kind == "scales":
            fields = read_fields(
                value,
                where,
                {"kind": str, "bits": int, "schedule": list},
                {"frames": int, "transform": (dict, type(None))},
            )
            schedule = tuple(
                tuple(read_integers(scale, f"{where}.schedule[{index}]", 2))
                for index, scale in enumerate(fields["schedule"])
            )
            transform = fields.get("transform")
            if transform is not None:
                names = dict.fromkeys(_RESIZE_FIELDS, int)
                transform = ResizePad(**read_fields(transform, f"{where}.transform", names))
            return ScalesLayout(fields["bits"], schedule, fields.get("frames", 1), transform)  # type: ignore[arg-type]
        if kind == "codebooks":
            fields = read_fields(
                value,
                where,
                {
                    "kind": str,
                    "codebook_size": int,
                    "levels": int,
                    "frame_rate": _NUMBER,
                    "sample_rate": _NUMBER,
                    "samples": int,
                },
                {"channels": int},
            )
            rates = {name: float(fields[name]) for name in ("frame_rate", "sample_rate")}
            return CodebooksLayout(**{name: fields[name] for name in fields if name != "kind"} | rates)
    except WireError:
        raise
    except (ValueError, OverflowError) as error:
        raise WireError(f"{where}: {error}", param=where) from None
    raise WireError(f"{where}.kind is {kind!r}; known: {', '.join(CODE_DTYPES)}", param=f"{where}.kind")


def check_finite(array: np.ndarray, where: str) -> None:
    """Refuse NaN and infinity, which would poison whatever is trained on them."""
    if not np.isfinite(array).all():
        raise WireError(f"{where} holds NaN or infinity", param=where)


def span_to_json(span: TokenSpan, features: bool = False) -> dict[str, Any]:
    """The span as a JSON object; ``features`` adds the features and the latent, base64 of float16.

    Raises:
        WireError: metadata that JSON can't carry, or non-finite features.
    """
    value: dict[str, Any] = {
        "modality": span.modality,
        "layout": layout_to_json(span.layout),
        "codes": span.codes.tolist(),
        "tokenizer": span.tokenizer,
        "metadata": plain_json(span.metadata, "metadata"),
    }
    if features:
        value["features"] = {
            name: _array_to_json(array, f"features.{name}") for name, array in span.features.items()
        }
        if span.latent is not None:
            value["latent"] = _array_to_json(span.latent, "latent")
    return value


def span_from_json(value: Any) -> TokenSpan:
    """The span that :func:`span_to_json` wrote.

    Raises:
        WireError: unknown or missing fields, wrong types, codes out of range, damaged base64, with the path.
    """
    fields = read_fields(
        value,
        "span",
        {"modality": str, "layout": dict, "codes": list, "tokenizer": str},
        {"metadata": (dict, type(None)), "features": (dict, type(None)), "latent": (dict, type(None))},
    )
    for name in ("modality", "tokenizer"):
        plain_json(fields[name], f"span.{name}")
    layout = layout_from_json(fields["layout"], "span.layout")
    features = fields.get("features") or {}
    latent = fields.get("latent")
    try:
        return TokenSpan(
            modality=fields["modality"],
            layout=layout,
            codes=_codes_from_json(fields["codes"], layout),
            tokenizer=fields["tokenizer"],
            features={
                name: _array_from_json(item, f"span.features.{name}") for name, item in features.items()
            },
            latent=None if latent is None else _array_from_json(latent, "span.latent"),
            metadata=plain_json(fields.get("metadata") or {}, "span.metadata"),
        )
    except WireError:
        raise
    except ValueError as error:
        raise WireError(f"span: {error}", param="span.codes") from None


def _codes_from_json(codes: list[Any], layout: Layout) -> np.ndarray:
    dtype = CODE_DTYPES[layout.kind]
    levels = layout.levels if isinstance(layout, CodebooksLayout) else 1
    if len(codes) * levels > MAX_CODES:
        raise WireError(f"{len(codes)} codes exceed the limit {MAX_CODES // levels}", param="span.codes")
    rows = codes if isinstance(layout, CodebooksLayout) else [codes]
    limits = np.iinfo(dtype)
    for index, row in enumerate(rows):
        where = f"span.codes[{index}]" if rows is codes else "span.codes"
        read_integers(row, where, layout.levels if isinstance(layout, CodebooksLayout) else None)
        if row and not (limits.min <= min(row) and max(row) <= limits.max):
            raise WireError(f"{where} leaves the range of {dtype.name}", param=where)
    shape = (len(codes), layout.levels) if isinstance(layout, CodebooksLayout) else (len(codes),)
    return np.array(codes, dtype).reshape(shape)


def _array_to_json(array: np.ndarray, where: str) -> dict[str, Any]:
    check_finite(array, where)
    data = np.ascontiguousarray(array, "<f2").tobytes()
    return {"dtype": "float16", "shape": list(array.shape), "data": base64.b64encode(data).decode()}


def _array_from_json(value: Any, where: str) -> np.ndarray:
    fields = read_fields(value, where, {"dtype": str, "shape": list, "data": str})
    if fields["dtype"] != "float16":
        raise WireError(f"{where}.dtype must be float16, got {fields['dtype']!r}", param=f"{where}.dtype")
    shape = checked_shape(fields["shape"], f"{where}.shape", 3)
    try:
        data = base64.b64decode(fields["data"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"{where}.data is not base64: {error}", param=f"{where}.data") from None
    if len(data) != 2 * math.prod(shape):
        raise WireError(
            f"{where}.data has {len(data)} bytes; {shape} needs {2 * math.prod(shape)}", param=where
        )
    array = np.frombuffer(data, "<f2").reshape(shape).astype(np.float16, copy=False)
    check_finite(array, where)
    return array


def checked_shape(value: Sequence[Any], where: str, dimensions: int | None = None) -> tuple[int, ...]:
    """A shape of ``dimensions`` (else at most 3) non-negative sizes with at most ``MAX_CODES`` values."""
    shape = tuple(read_integers(value, where, dimensions))
    if len(shape) > 3 or any(not 0 <= size <= MAX_CODES for size in shape) or math.prod(shape) > MAX_CODES:
        raise WireError(f"{where} {list(shape)[:8]} exceeds 3 dimensions or {MAX_CODES} values", param=where)
    return shape
