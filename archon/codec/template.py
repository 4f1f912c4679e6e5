"""A model's own chat template: compiled once, run in a sandbox, the same text as `transformers`.

Invariant: the text is a function of the template, the messages, the tools and the arguments (and
of the clock, where a template asks for it). A template is the model's, not ours: it reaches
nothing but what it is given.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from archon.codec.conversation import Message
from archon.codec.errors import CodecError

_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what an assistant says; to the text it adds nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """No underscore names, as in `transformers`: they are a way to the interpreter's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
    )
    return environment


class ChatTemplate:
    """``source`` is the template, and perhaps another for requests with tools."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        environment = _environment()
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        self._special_tokens = dict(special_tokens)
        try:
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(tool_source or source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        names = meta.find_undeclared_variables(environment.parse(tool_source or source))
        self.takes_tools = "tools" in names
        self._knows_developer = "developer" in self.source

    def text(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """Messages and tools in plain form. CodecError where the template refuses them.

        A template that insists on alternating roles gets neighbours of one role as one message.
        """
        seen = [self._as_seen(message) for message in messages]
        render = (self._with_tools if tools else self._plain).render
        kwargs = {**self._special_tokens, **kwargs}
        kwargs |= {"tools": tools, "documents": None}
        kwargs["add_generation_prompt"] = add_generation_prompt
        try:
            return _well_formed(_tried(render, seen, kwargs))
        except CodecError:
            merged = _merge_neighbours(seen)
            if len(merged) == len(seen):
                raise
            return _well_formed(_tried(render, merged, kwargs))

    def _as_seen(self, message: Message) -> Message:
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        if "reasoning_content" in message:
            return {"thinking": message["reasoning_content"], **message}
        return message


def _tried(render: Callable[..., str], messages: list[Message], kwargs: dict[str, Any]) -> str:
    try:
        return render(messages=messages, **kwargs)
    except _REFUSALS as error:
        raise CodecError(f"the model's chat template refuses this: {error}", "messages") from error


def _merge_neighbours(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last["role"] == message["role"] and message["role"] in ("user", "system"):
            content = f"{last['content']}\n\n{message['content']}"
            merged[-1] = {**last, "content": content}
        else:
            merged.append(message)
    return merged


def _well_formed(text: str) -> str:
    """Half a surrogate pair, which JSON lets through, cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
