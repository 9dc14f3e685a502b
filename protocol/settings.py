"""Typed settings: explicit values before the environment before a file before defaults.

A settings class is a pydantic model with nested sections. Each value may also be set by the environment
variable ``ERNIE_MULTI_<SECTION>_<FIELD>`` (deeper sections: ``ERNIE_MULTI_TRAIN_OPTIMIZER_LR``);
an empty variable counts as unset. An unknown key is refused with the nearest known name; an error names
the path of the value and where it came from.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ernie5.protocol.errors import InvalidInputError

ENVIRONMENT_PREFIX = "ERNIE_MULTI"
_CLOSE = 0.75

SettingsT = TypeVar("SettingsT", bound="Settings")


class Settings(BaseModel):
    """Base of all settings and of their sections; immutable.

    ``section`` is the name of a class that is loaded by itself; inside another class, the name of the field
    counts. ``environment_names`` gives fields further, conventional variables (``REDIS_URL``), which yield to
    the field's own one. Fields declared with ``Field(repr=False)`` are secrets: no error shows their value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    section: ClassVar[str] = ""
    environment_names: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_names_only(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for name in values:
                if name not in cls.model_fields:
                    nearest = nearest_name(str(name), cls.model_fields)
                    raise PydanticCustomError(
                        "unknown_setting",
                        "unknown setting '{name}'; {hint}",
                        {"name": str(name), "hint": _hint(nearest, cls)},
                    )
        return values


def load_settings(
    cls: type[SettingsT],
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> SettingsT:
    """Settings of ``cls`` from ``overrides`` > ``environ`` > ``file`` (YAML or JSON) > defaults.

    ``file`` and ``overrides`` have the shape of ``cls``: nested mappings; ``overrides`` also takes dotted
    names (``{"stream.high_water": 64}``) and skips values that are None, so that unset command-line options
    fit.

    Raises:
        InvalidInputError: an unknown name, a value of the wrong type or range, or an unreadable file;
            ``param`` is the path of the value.
    """
    values: dict[str, Any] = {}
    origins: dict[tuple[str, ...], str] = {}
    if file is not None:
        for path, value in _leaves(_read_file(Path(file)), cls):
            _place(values, path, value)
            origins[path] = f"from {file}"
    for path, value, variable in _environment(cls, environ):
        _place(values, path, value)
        origins[path] = f"from {variable}"
    for path, value in _explicit(overrides or {}, cls):
        _place(values, path, value)
        origins[path] = ""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise _as_input_error(cls, error, origins) from None


def nearest_name(name: str, known: Mapping[str, Any], cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, or None when nothing is close."""
    return next(iter(difflib.get_close_matches(name.lower(), list(known), 1, cutoff)), None)


def environment_variable(cls: type[Settings], path: tuple[str, ...]) -> str:
    """The variable that sets the value at ``path`` of ``cls``."""
    parts = [ENVIRONMENT_PREFIX, cls.section, *path] if cls.section else [ENVIRONMENT_PREFIX, *path]
    return "_".join(parts).upper()


def _hint(nearest: str | None, cls: type[Settings]) -> str:
    return f"did you mean '{nearest}'?" if nearest else f"known: {', '.join(cls.model_fields)}"


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, else the type itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _section_class(annotation: Any) -> type[Settings] | None:
    """The settings class behind a field's type (itself, or in a union with None)."""
    for kind in _alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, Settings):
            return kind
    return None


def _fields(
    cls: type[Settings], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[Settings]]]:
    """Path of each leaf field and the class that declares it."""
    for name, field in cls.model_fields.items():
        section = _section_class(field.annotation)
        if section is not None:
            yield from _fields(section, (*path, name))
        else:
            yield (*path, name), cls


def _environment(
    cls: type[Settings], environ: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Path, value and variable of each value that the environment sets."""
    own: dict[str, tuple[str, ...]] = {}
    for path, owner in _fields(cls):
        variable = environment_variable(cls, path)
        own[variable] = path
        conventional = owner.environment_names.get(path[-1])
        for name in (variable, conventional):
            if name is not None and environ.get(name):
                annotation = owner.model_fields[path[-1]].annotation
                yield path, _from_text(environ[name], annotation, ".".join(path), name), name
                break
    # Only near misses are refused: other programs (Kubernetes' service links) add variables of like prefix.
    prefixes = {variable[: -len(path[-1])] for variable, path in own.items()} - {f"{ENVIRONMENT_PREFIX}_"}
    for variable in sorted(environ):
        if variable not in own and any(variable.startswith(prefix) for prefix in prefixes):
            nearest = next(iter(difflib.get_close_matches(variable, list(own), 1, 0.9)), None)
            if nearest is not None and _differs_in_field_only(variable, nearest, own[nearest][-1]):
                raise InvalidInputError(
                    f"unknown variable {variable}; did you mean {nearest}?", param=".".join(own[nearest])
                )


def _differs_in_field_only(variable: str, known: str, field: str) -> bool:
    prefix = known[: -len(field)]
    if not variable.startswith(prefix):
        return False
    return difflib.SequenceMatcher(None, variable[len(prefix) :], field.upper()).ratio() >= _CLOSE


def _from_text(text: str, annotation: Any, where: str, variable: str) -> Any:
    """The value of a variable: JSON for lists and mappings, else the text itself (pydantic converts it)."""
    if text[:1] not in "[{" or str in _alternatives(annotation):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"{where}: {variable} is not JSON: {error}", param=where) from None


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"settings file {path} can't be read: {error}", param="file") from None
    try:
        if path.suffix == ".json":
            values = json.loads(text)
        else:
            import yaml  # here, so that programs without a settings file don't need it

            try:
                values = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(error) from None
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"settings file {path} can't be parsed: {error}", param="file") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidInputError(
            f"settings file {path} must hold a mapping, got {type(values).__name__}", param="file"
        )
    return values


def _explicit(overrides: Mapping[str, Any], cls: type[Settings]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of each override that is set; a dotted name stands for nested mappings."""
    for name, value in overrides.items():
        nested: Any = value
        for part in reversed(str(name).split(".")):
            nested = {part: nested}
        yield from ((path, item) for path, item in _leaves(nested, cls) if item is not None)


def _leaves(
    values: Mapping[str, Any], cls: type[Settings] | None, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of each entry; mappings are entered where ``cls`` has a section."""
    for name, value in values.items():
        field = cls.model_fields.get(name) if cls is not None and isinstance(name, str) else None
        section = _section_class(field.annotation) if field is not None else None
        if section is not None and isinstance(value, Mapping):
            yield from _leaves(value, section, (*path, name))
        elif not (section is not None and value is None):  # an empty YAML section keeps its defaults
            yield (*path, str(name)), value


def _place(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Put a value at a path, in place of what is there."""
    for name in path[:-1]:
        below = values.get(name)
        if not isinstance(below, dict):
            below = values[name] = {}
        values = below
    values[path[-1]] = value


def _as_input_error(
    cls: type[Settings], error: ValidationError, origins: Mapping[tuple[str, ...], str]
) -> InvalidInputError:
    """The first problem as an error that names path, value, and where the value came from."""
    problem = error.errors(include_url=False)[0]
    path = tuple(str(part) for part in problem["loc"])
    if problem["type"] == "unknown_setting":
        context = problem["ctx"]
        path = (*path, context["name"])
        where = ".".join((cls.section, *path) if cls.section else path)
        message = f"unknown setting '{where}'; {context['hint']}"
    else:
        where = ".".join((cls.section, *path) if cls.section else path)
        reason = problem["msg"].removeprefix("Value error, ")
        shown = problem["type"] not in ("missing",) and path and not _is_secret(cls, path)
        got = f", got {problem['input']!r}" if shown and not isinstance(problem["input"], dict) else ""
        message = f"{where or cls.__name__}: {reason}{got}"
    origin = next((origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), "")
    return InvalidInputError(f"{message} ({origin})" if origin else message, param=where or None)


def _is_secret(cls: type[Settings], path: tuple[str, ...]) -> bool:
    current: type[Settings] | None = cls
    for name in path:
        field = current.model_fields.get(name) if current is not None else None
        if field is None:
            return False
        if not field.repr:
            return True
        current = _section_class(field.annotation)
    return False
