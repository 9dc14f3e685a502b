"""What `ernie-multi modalities` does: each with its layout, its service and what its sample keeps."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from ernie5.protocol.errors import ErnieMultiError, InvalidInputError
from ernie5.tokenizers.modalities import BUILT_IN, Codec, Figure, load_registry, round_trip
from ernie5.tokenizers.modalities.bases import load_base


def show(*, measure: bool = True, as_json: bool = False) -> None:
    """Print the modalities; ``measure`` sends each sample file through its tokenizer and back.

    Raises:
        InvalidInputError: a round trip crossed its stated limit, or a plug-in can't be used; all is printed
        first.
    """
    registry = load_registry()
    bases: dict[str, Any] = {}
    rows, failed = [], list(registry.problems.values())
    for name, codec in registry.codecs.items():
        figure, problem = _measured(codec, bases) if measure else (None, None)
        if figure is not None and not figure.passed:
            failed.append(f"{name}: {figure}")
        rows.append(_row(codec, figure, problem))
    if as_json:
        print(json.dumps({"modalities": rows, "problems": registry.problems}, ensure_ascii=False))
    else:
        table = Table("modality", "layout", "service", "content types", "comes back", "its sample file")
        for row in rows:
            table.add_row(
                row["modality"] + ("" if row["built_in"] else " (plug-in)"),
                row["layout"],
                row["service"],
                ", ".join(row["content_types"]),
                row["promise"],
                row["round_trip"]["told"] if row["round_trip"] else row["problem"] or "–",
            )
        Console().print(table)
    if failed:
        raise InvalidInputError("; ".join(failed))


def _measured(codec: Codec[Any], bases: dict[str, Any]) -> tuple[Figure | None, str | None]:
    """The figure of a sample's round trip, or why there is none."""
    service = codec.modality.service
    try:
        if service not in bases:
            bases[service] = load_base(service)
        return round_trip(codec, bases[service]), None
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed: pip install 'ernie-multi[{service}]'"
    except ErnieMultiError as error:
        return None, error.message


def _row(codec: Codec[Any], figure: Figure | None, problem: str | None) -> dict[str, Any]:
    modality, sample = codec.modality, codec.sample
    told = figure and {
        "name": figure.name,
        "value": figure.value,
        "unit": figure.unit,
        "limit": figure.limit,
        "passed": figure.passed,
        "told": str(figure),
    }
    return {
        "modality": modality.name,
        "layout": modality.layout,
        "service": modality.service,
        "built_in": modality.name in BUILT_IN,
        "content_types": list(codec.content_types),
        "promise": codec.promise,
        "sample": {"file": sample.path.name, "source": sample.source, "licence": sample.licence},
        "round_trip": told,
        "problem": problem,
    }
