"""A request's messages and tools in the form in which a chat template sees them.

Invariant: messages that a client may write in several ways (a string or text blocks, null or no
content, arguments as text or as an object) become one form here, so they render to the same text.
What a template cannot show, an image say, is refused with its place and never left out.
"""

import json
from collections.abc import Sequence
from typing import Any

from archon.codec.errors import CodecError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
Message = dict[str, Any]


class RawArguments(str):
    """Arguments that are no JSON object: a string to a template that asks, one pair to others."""

    def items(self) -> list[tuple[str, str]]:
        return [("arguments", str(self))]


def plain_messages(messages: Sequence[Any]) -> list[Message]:
    """Raises CodecError, with the place, for what is not a conversation."""
    if not isinstance(messages, list | tuple) or not messages:
        raise CodecError("messages must be a list with at least one message", "messages")
    return [_plain_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def plain_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """The client's tools, keys in the client's order; cache markers say nothing to a model."""
    if not tools:
        return None
    plain = []
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise CodecError("a tool needs a function with a name", f"tools[{at}].function.name")
        cleaned = {key: value for key, value in tool.items() if key != "cache_control"}
        cleaned["function"] = {k: v for k, v in function.items() if k != "cache_control"}
        plain.append(cleaned)
    return plain


def _plain_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise CodecError("a message must be an object", where)
    role = message.get("role")
    if role not in ROLES:
        raise CodecError(f"role must be one of {', '.join(ROLES)}", f"{where}.role")
    plain: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    if isinstance(message.get("name"), str):
        plain["name"] = message["name"]
    if role == "assistant":
        _plain_assistant(plain, message, where)
    if role == "tool" and message.get("tool_call_id") is not None:
        plain["tool_call_id"] = str(message["tool_call_id"])
    return plain


def _plain_assistant(plain: Message, message: Message, where: str) -> None:
    if message.get("function_call"):
        raise CodecError("function_call is not supported, use tool_calls", f"{where}.function_call")
    reasoning = next((message[k] for k in REASONING_KEYS if isinstance(message.get(k), str)), "")
    if reasoning:
        plain["reasoning_content"] = reasoning
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise CodecError("tool_calls must be a list", f"{where}.tool_calls")
    if calls:
        plain["tool_calls"] = [
            _plain_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)
        ]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CodecError("a tool call needs a function with a name", f"{where}.function")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(given: Any) -> Any:
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    if not isinstance(given, str):
        return RawArguments(json.dumps(given, ensure_ascii=False))
    value = parse_json(given)
    return value if isinstance(value, dict) else RawArguments(given)


def parse_json(text: str) -> Any:
    """The JSON value, or None where the text is none (a JSON null is no arguments either)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CodecError("content must be a string or a list of text parts", where)
    return "".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise CodecError(f"content part {kind!r} is not supported: this model reads text", where)
    return text
