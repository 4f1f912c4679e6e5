"""What every answer format is: a machine that turns text, as it comes, into pieces of an answer.

Invariant: the pieces depend on the text and never on how it was cut; nothing said is lost: what
is not understood stays content, word for word. Nothing is ever evaluated.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Call:
    """``arguments`` is the JSON text that the client gets."""

    name: str
    arguments: str


Piece = Content | Reasoning | Call


class Machine(Protocol):
    """``stopped``: the model ended the answer itself, nothing was cut off."""

    def push(self, text: str) -> Iterator[Piece]: ...

    def finish(self, stopped: bool) -> Iterator[Piece]: ...


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def json_object(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    """The JSON object that begins at ``start`` (after white space) and its end, or None."""
    while start < len(text) and text[start].isspace():
        start += 1
    if not text.startswith("{", start):
        return None
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def call_of(value: dict[str, Any], key: str, missing: Any = None) -> Call | None:
    """A call, if ``value`` names a function and its arguments under ``key``."""
    name, arguments = value.get("name"), value.get(key, missing)
    if not isinstance(name, str) or not name or arguments is None:
        return None
    try:
        if isinstance(arguments, str):
            text = arguments
        else:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()  # half a surrogate pair could not be sent to the client
    except ValueError:
        return None
    return Call(name, text)


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
