"""Conversations that tests share."""

from typing import Any

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather, "now" & <soon>, in Zürich or 北京',
            "parameters": {
                "type": "object",
                "required": ["city"],
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "北京"]},
                    "days": {"default": None, "type": "integer", "minimum": 1},
                },
                "additionalProperties": False,
            },
        },
    },
    {"function": {"parameters": {}, "name": "run", "description": ""}, "type": "function"},
]


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(text: str | None, *calls: Message, reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": list(calls)} if calls else {})


def call(name: str, arguments: Any, call_id: str = "c1") -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(text: str, call_id: str = "c1") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
