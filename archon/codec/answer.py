"""What a sampled answer means to a client, whole or piece by piece.

Invariant: the deltas of a stream, put together, are the parsed answer; a tool call is one delta.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Delta:
    """One piece of an answer: exactly one of the three is set.

    ``tool_call`` is ``{"index", "id", "type", "function": {"name", "arguments"}}`` and always
    whole; ``index`` counts from 0 within the answer.
    """

    content: str | None = None
    reasoning: str | None = None
    tool_call: dict[str, Any] | None = None


@dataclass(frozen=True)
class ParsedAnswer:
    """``finish_reason`` is the client's; ``tool_calls`` carry no ``index``.

    ``content`` is None only where there are tool calls and no text.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = "stop"


def assemble(deltas: list[Delta], finish_reason: str) -> ParsedAnswer:
    content = "".join(delta.content for delta in deltas if delta.content)
    reasoning = "".join(delta.reasoning for delta in deltas if delta.reasoning)
    calls = [
        {key: value for key, value in delta.tool_call.items() if key != "index"}
        for delta in deltas
        if delta.tool_call
    ]
    return ParsedAnswer(
        content=content if content or not calls else None,
        reasoning=reasoning or None,
        tool_calls=calls,
        finish_reason="tool_calls" if calls and finish_reason == "stop" else finish_reason,
    )
