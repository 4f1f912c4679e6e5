"""The answer formats, one module each, and the choice of one by a model's chat template."""

from collections.abc import Callable
from dataclasses import dataclass

from archon.codec.formats.base import Call, Content, Machine, Piece, Reasoning
from archon.codec.formats.hermes import Hermes
from archon.codec.formats.llama3 import Llama3
from archon.codec.formats.plain import Plain
from archon.codec.formats.thinking import Thinking

__all__ = ["AnswerFormat", "Call", "Content", "Machine", "Piece", "Reasoning", "choose"]


@dataclass(frozen=True)
class AnswerFormat:
    """How a model family writes answers. ``with_tools`` is None where calls cannot be read."""

    name: str
    thinks: bool
    opened_by_prompt: bool
    with_tools: Callable[[], Machine] | None

    def machine(self, tools: bool) -> Machine:
        inner = self.with_tools() if tools and self.with_tools else Plain()
        return Thinking(inner, self.opened_by_prompt) if self.thinks else inner


def choose(template: str, opened_by_prompt: bool, many_calls: bool) -> AnswerFormat:
    """``many_calls``: the template can show more than one call in a message."""
    name: str = "plain"
    with_tools: Callable[[], Machine] | None = None
    if "<tool_call>" in template and "<function=" not in template:
        name, with_tools = "hermes", Hermes
    elif "<|python_tag|>" in template or ("<|eot_id|>" in template and "parameters" in template):
        name, with_tools = "llama3", lambda: Llama3(None if many_calls else 1)
    thinks = opened_by_prompt or "</think>" in template
    return AnswerFormat(name, thinks, opened_by_prompt, with_tools)
