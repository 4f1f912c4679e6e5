"""Settings as the command line sees them: flags over environment over file."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from archon.settings import Settings
from archon.stack.errors import StackError


def flags(named: dict[str, Any], pairs: Sequence[str] = ()) -> dict[str, Any]:
    """Nested settings of the options that were given and of ``--set NAME=VALUE`` pairs."""
    nested: dict[str, Any] = {}
    for name, value in named.items():
        if value is not None:
            _put(nested, name, value)
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise StackError(f"--set {pair}: write NAME=VALUE, as in engine.threads=2")
        _put(nested, name, json.loads(text) if text[:1] in ("[", "{") else text)
    return nested


def _put(nested: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        nested = nested.setdefault(section, {})
        if not isinstance(nested, dict):
            raise StackError(f"--set {name}: {section} is set to a value as well")
    nested[last] = value


def load(config: Path | None, given: dict[str, Any]) -> Settings:
    """The settings; ``config`` is looked up by our children too, by the environment."""
    if config is not None:
        os.environ["ARCHON_CONFIG"] = str(config.absolute())
    return Settings(**given)


def explain(error: ValueError) -> str:
    """A message for people: which setting, what is wrong with it."""
    if not isinstance(error, ValidationError):
        return str(error)
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            message = "no such setting"
        else:
            message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{name}: {message}" if name else message)
    return "\n  ".join(lines)
