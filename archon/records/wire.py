"""Records as JSON and back, by their annotations.

Invariant: ``loads(cls, dumps(record)) == record`` for every record without ``bytes`` fields, and
``dumps`` is canonical (sorted keys, no spaces), so that a digest of it names the record.
"""

import dataclasses
import json
import types
import typing
from datetime import datetime
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


def dumps(record: Any) -> str:
    """Canonical JSON of a record: sorted keys, ISO times, enums by value."""
    return json.dumps(
        dataclasses.asdict(record), sort_keys=True, separators=(",", ":"), default=_plain
    )


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")


def loads(cls: type[T], data: str | dict[str, Any]) -> T:
    """Build ``cls`` from :func:`dumps`' text or its parsed form. An unknown field is refused."""
    fields: dict[str, Any] = json.loads(data) if isinstance(data, str) else data
    hints = hints_of(cls)
    if unknown := sorted(set(fields) - set(hints)):
        raise ValueError(f"{cls.__name__}: unknown field {', '.join(unknown)}")
    return cls(**{name: build(hints[name], value) for name, value in fields.items()})


_HINTS: dict[Any, dict[str, Any]] = {}


def hints_of(cls: Any) -> dict[str, Any]:
    """Field name → annotation, resolved once per class."""
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def build(hint: Any, value: Any) -> Any:
    """``value``, read from JSON, as the annotation ``hint`` wants it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return build(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        return tuple(build(args[0], item) for item in value)
    if origin is list:
        return [build(args[0], item) for item in value]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return loads(hint, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is datetime:
        return datetime.fromisoformat(value)
    if hint is float and isinstance(value, int):
        return float(value)
    return value
