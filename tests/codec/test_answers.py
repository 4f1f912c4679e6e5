"""Sampled ids become content, reasoning and calls; nothing said is lost, nothing is run."""

import json
from pathlib import Path
from typing import Any

import pytest

from archon.codec import Codec, ParsedAnswer
from tests.codec.conftest import Loader
from tests.codec.conversations import TOOLS, result, user
from tests.codec.models import write_model


def parsed(codec: Codec, text: str, reason: str = "stop", tools: Any = TOOLS) -> ParsedAnswer:
    return codec.parse(codec.encode(text), reason, tools)


def calls(answer: ParsedAnswer) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in answer.tool_calls
    ]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


A, B = hermes("run", '{"a": "ü"}'), hermes("get_weather", "{}")


def test_the_stop_token_is_not_shown_and_others_are(codec: Loader) -> None:
    made = codec("plain")
    assert parsed(made, "hi<|im_end|>").content == "hi"
    assert parsed(made, "hi<|endoftext|>").content == "hi"
    assert parsed(made, "a<|im_start|>b<|im_end|>c").content == "a<|im_start|>b<|im_end|>c"
    assert parsed(made, "a<|im_end|><|im_end|>").content == "a<|im_end|>"
    assert parsed(made, "").content == ""


def test_calls_and_the_text_before(codec: Loader) -> None:
    answer = parsed(codec("qwen25"), f"Look:\n{A}\n{B}<|im_end|>")
    assert (answer.content, answer.reasoning) == ("Look:", None)
    assert answer.finish_reason == "tool_calls"
    assert calls(answer) == [("run", {"a": "ü"}), ("get_weather", {})]
    assert answer.tool_calls[0]["function"]["arguments"] == '{"a": "ü"}'
    assert [call["type"] for call in answer.tool_calls] == ["function", "function"]
    assert len({call["id"] for call in answer.tool_calls}) == 2


def test_only_calls_is_null_content(codec: Loader) -> None:
    assert parsed(codec("qwen25"), A).content is None


def test_without_tools_a_call_is_text(codec: Loader) -> None:
    no_tools: list[Any] = [None, []]
    for tools in no_tools:
        answer = parsed(codec("qwen25"), A, tools=tools)
        assert (answer.content, answer.tool_calls, answer.finish_reason) == (A, [], "stop")


BROKEN = [
    "<tool_call\n" + A.removeprefix("<tool_call>"),
    '<tool_call>\n{"name": "run", "arguments": {a}}\n</tool_call>',
    '<tool_call>\n{"name": "run, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    '<tool_call>\n["run"]\n</tool_call>',
    '<tool_call>\n{"name": "run", "arguments": {"a": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "run", "arguments": {"a": 1e400}}\n</tool_call>',
    '<tool_call>\n{"name": "run", "arguments": {"a": "\\ud83d"}}\n</tool_call>',
    '<tool_call>\n{"name": "\\udc00", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "run", "arguments": ' + "[" * 100_000 + "\n</tool_call>",
    "<tool_call>\n</tool_call>",
    "<tool_call></tool_call>",
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_call_is_skipped_and_its_text_kept(broken: str, codec: Loader) -> None:
    alone = parsed(codec("qwen25"), f"x {broken} y")
    assert (alone.content, alone.tool_calls, alone.finish_reason) == (f"x {broken} y", [], "stop")
    among = parsed(codec("qwen25"), f"x\n{broken}\n{B}")
    assert calls(among) == [("get_weather", {})]
    assert among.content == f"x\n{broken}"
    behind = parsed(codec("qwen25"), f"{B}\n{broken}")
    assert calls(behind) == [("get_weather", {})]
    assert behind.content == f"\n{broken}"


@pytest.mark.parametrize("between", ["", "\n", " \n\n"])
def test_a_call_left_open_ends_at_the_next(between: str, codec: Loader) -> None:
    open_a = A.removesuffix("\n</tool_call>")
    answer = parsed(codec("qwen25"), f"{open_a}{between}{B}")
    assert calls(answer) == [("run", {"a": "ü"}), ("get_weather", {})]
    assert answer.content is None
    broken = parsed(codec("qwen25"), f'<tool_call>{{"name": {between}{B}')
    assert calls(broken) == [("get_weather", {})]
    assert broken.content == f'<tool_call>{{"name": {between}'


@pytest.mark.parametrize(
    "inner", ["</tool_call>", A, f"{A}{B}", "<tool_call>", '"</tool_call>"\\', "\\</tool_call>\n"]
)
def test_tags_within_an_argument_are_its_text(inner: str, codec: Loader) -> None:
    answer = parsed(codec("qwen25"), hermes("run", json.dumps({"text": inner})) + B)
    assert calls(answer) == [("run", {"text": inner}), ("get_weather", {})]


def test_a_line_break_within_a_string_is_forgiven(codec: Loader) -> None:
    assert calls(parsed(codec("qwen25"), hermes("run", '{"a": "b\n\tc"}'))) == [
        ("run", {"a": "b\n\tc"})
    ]


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_call_cut_off_is_text_and_what_it_quotes_is_no_call(reason: str, codec: Loader) -> None:
    quoting = '<tool_call>\n{"name": "run", "arguments": {"text": ' + json.dumps(f"{B} {B}")
    answer = parsed(codec("qwen25"), f"x\n{A}\n{quoting[:-1]}", reason)
    assert calls(answer) == [("run", {"a": "ü"})]
    assert answer.content == f"x\n{quoting[:-1]}"
    assert answer.finish_reason == reason
    for size in range(len("<tool_call>")):
        begun = f"x\n{A[:size]}"
        assert parsed(codec("qwen25"), begun, reason).content == begun


def test_a_call_that_lacks_only_its_close_tag_is_whole(codec: Loader) -> None:
    for end in ("", "\n", "\n</tool_"):
        answer = parsed(codec("qwen25"), A.removesuffix("\n</tool_call>") + end, "length")
        assert calls(answer) == [("run", {"a": "ü"})]
        assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ('"plain"', "plain"),
        ("\"__import__('os').system('touch x')\"", "__import__('os').system('touch x')"),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("[1]", "[1]"),
        ('{"b":1,"a":1.0,"\\u00fc":"\\ud83d\\ude00"}', '{"b": 1, "a": 1.0, "ü": "😀"}'),
    ],
)
def test_arguments_are_data(written: str, given: str, codec: Loader) -> None:
    answer = parsed(codec("qwen25"), hermes("run", written))
    assert answer.tool_calls[0]["function"]["arguments"] == given
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("\n<think>hm\n\nso</think>yes\n", "hm\n\nso", "yes\n"),
        ("<think>\n\n</think>\n\nyes", None, "yes"),
        ("<think>\nhm", "hm", ""),
        ("<think>\nhm\n</thi", "hm\n</thi", ""),
        ("<thi", None, "<thi"),
        ("  ", None, "  "),
        ("yes <think>no</think>", None, "yes <think>no</think>"),
        ("yes</think>", None, "yes</think>"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ],
)
def test_reasoning(text: str, reasoning: str | None, content: str, codec: Loader) -> None:
    answer = parsed(codec("qwen3"), text)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert parsed(codec("qwen25"), text).content == text


def test_calls_count_after_the_reasoning_only(codec: Loader) -> None:
    answer = parsed(codec("qwen3"), f"<think>\nI may {A}\n</think>\n\n{B}")
    assert answer.reasoning == f"I may {A}"
    assert calls(answer) == [("get_weather", {})]
    assert answer.content is None


def test_a_prompt_that_opens_the_thinking(codec: Loader) -> None:
    made = codec("items")
    assert parsed(made, "hm\n</think>\n\nyes", tools=None).reasoning == "hm"
    assert parsed(made, "<think>\nhm\n</think>\n\nyes", tools=None).reasoning == "hm"
    assert parsed(made, "hm", tools=None) == ParsedAnswer("", "hm", [], "stop")


LLAMA = '{"name": "run", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "names", "content"),
    [
        (LLAMA, ["run"], None),
        (f"\n<|python_tag|>{LLAMA}\n", ["run"], None),
        ('{"name": "run", "arguments": {}}', ["run"], None),
        (f"{LLAMA}; {LLAMA}", ["run"], LLAMA),
        ('{"name": "Bob"}', [], '{"name": "Bob"}'),
        (f"I call {LLAMA}", [], f"I call {LLAMA}"),
        (LLAMA[:-1], [], LLAMA[:-1]),
        ("<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
    ],
)
def test_llama_calls(text: str, names: list[str], content: str | None, codec: Loader) -> None:
    answer = parsed(codec("llama31"), f"{text}<|eot_id|>")
    assert [call["function"]["name"] for call in answer.tool_calls] == names
    assert answer.content == content
    assert answer.finish_reason == ("tool_calls" if names else "stop")


def test_what_was_parsed_can_be_shown_again(codec: Loader) -> None:
    for text, family in ((f"x\n{A}\n{B}", "qwen25"), (A, "qwen3"), (f"{LLAMA};{LLAMA}", "llama31")):
        made = codec(family)
        message = made.answer_message(parsed(made, text))
        ids = [call["id"] for call in message["tool_calls"]]
        made.render([user("x"), message, *(result("ok", one) for one in ids)], TOOLS)


def test_a_template_with_several_llama_calls_takes_them_all(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ {'name': c.function.name, 'parameters': c.function.arguments} | tojson }};"
        "{% endfor %}<|eot_id|>{% endfor %}{{ tools | tojson }}"
    )
    made = Codec.load(write_model(tmp_path, "llama31", template))
    assert len(parsed(made, f"{LLAMA}; {LLAMA}").tool_calls) == 2
