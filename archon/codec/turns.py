"""Where a template puts an answer: what it writes before and after, found by trying it once.

Invariant: what is learnt here comes from the template's own text with marked messages, so that no
model's name and no end-of-turn token is known to us beforehand.
"""

from dataclasses import dataclass
from typing import Any

from archon.codec.conversation import Message
from archon.codec.errors import CodecError
from archon.codec.template import ChatTemplate

_ASKED, _SAID = "Qq7Qq", "Zz9Zz"
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
}


@dataclass(frozen=True)
class Turns:
    """``closer`` is what comes after an answer's own text; None where it cannot be known."""

    closer: str | None
    opens_thinking: bool
    many_calls: bool


def probe(template: ChatTemplate) -> Turns:
    ask: Message = {"role": "user", "content": _ASKED}
    said = _text(template, [ask, {"role": "assistant", "content": _SAID}])
    closer = said.rpartition(_SAID)[2] if said and said.count(_SAID) == 1 else None
    prompt = _text(template, [ask], prompt=True) or ""
    return Turns(
        closer=closer,
        opens_thinking=prompt.rstrip().endswith("<think>"),
        many_calls=template.takes_tools and _takes_two_calls(template, ask),
    )


def _takes_two_calls(template: ChatTemplate, ask: Message) -> bool:
    call = {"id": "callaaaaa", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    return _text(template, [ask, answer], tools=[_TOOL]) is not None


def _text(
    template: ChatTemplate,
    messages: list[Message],
    prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> str | None:
    try:
        return template.text(messages, tools, prompt)
    except CodecError:
        return None
