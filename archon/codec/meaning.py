"""What a conversation means, whatever way a client wrote it down.

Invariant: two conversations with the same digest have the same messages in every respect that can
reach a template, save the names of tool-call ids, which only link a result to its call and which
some clients rewrite. Digests are chained message by message: equal digests, equal beginnings.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from archon.codec.conversation import Message, parse_json, plain_messages, plain_tools


def normalise_messages(messages: Sequence[Any]) -> list[Message]:
    """Canonical messages: equal where the meaning is equal, and a valid conversation themselves.

    The normal form of a beginning is the beginning of the normal form. Compare by digest: to
    Python, though not to JSON, ``True == 1``.
    """
    names: dict[str, str] = {}
    numbers = itertools.count()
    return [_normal(message, names, numbers) for message in plain_messages(messages)]


def messages_digest(
    messages: Sequence[Any], tools: Sequence[Any] | None = None, *, reasoning: bool = True
) -> str:
    """Hex digest of the meaning. ``reasoning=False`` looks away from reasoning, which many clients
    drop: good for finding the call that a request follows, not for token-exact history."""
    return prefix_digests(messages, tools, reasoning=reasoning)[-1]


def prefix_digests(
    messages: Sequence[Any], tools: Sequence[Any] | None = None, *, reasoning: bool = True
) -> list[str]:
    """``[k]`` is ``messages_digest(messages[:k + 1], tools)``; all of them in one pass."""
    state = hashlib.sha256(_canonical_json(plain_tools(tools))).digest()
    digests = []
    for message in normalise_messages(messages):
        if not reasoning:
            message.pop("reasoning_content", None)
        state = hashlib.sha256(state + _canonical_json(message)).digest()
        digests.append(state.hex())
    return digests


def _normal(message: Message, names: dict[str, str], numbers: Iterator[int]) -> Message:
    if message["role"] == "developer":
        message["role"] = "system"
    for call in message.get("tool_calls", ()):
        name = f"call_{next(numbers)}"
        names[call["id"] or name] = name
        call["id"] = name
        call["function"]["arguments"] = _arguments_value(call["function"]["arguments"])
    if "tool_call_id" in message:
        message["tool_call_id"] = names.get(message["tool_call_id"], message["tool_call_id"])
    return message


def _arguments_value(arguments: Any) -> Any:
    """An object or list as a JSON value; text that is neither stays text."""
    if isinstance(arguments, str):
        value = parse_json(arguments)
        return canonical_value(value) if isinstance(value, list) else str(arguments)
    return canonical_value(arguments)


def canonical_value(value: Any) -> Any:
    """JSON knows one kind of number: 1.0 and 1 are the same, true is another thing."""
    if isinstance(value, dict):
        return {key: canonical_value(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [canonical_value(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _canonical_json(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii")
