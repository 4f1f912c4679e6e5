"""However ids are cut, the stream gives the same; characters and calls come whole."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archon.codec import Codec, Delta, ParsedAnswer
from archon.codec.answer import assemble
from archon.codec.formats import hermes
from archon.codec.formats.base import json_object
from tests.codec.conftest import Loader
from tests.codec.conversations import TOOLS
from tests.codec.examples import examples


def numbered() -> Any:
    numbers = iter(range(1000))
    return lambda: f"call_{next(numbers)}"


def streamed(
    codec: Codec, ids: list[int], cuts: list[int], reason: str = "stop", tools: Any = TOOLS
) -> tuple[list[Delta], ParsedAnswer]:
    stream = codec.stream(tools, call_id=numbered())
    marks = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [d for a, b in zip(marks, marks[1:], strict=False) for d in stream.push(ids[a:b])]
    deltas += stream.finish(reason)
    return deltas, stream.answer


def one_by_one(codec: Codec, ids: list[int], reason: str, tools: Any = TOOLS) -> ParsedAnswer:
    return streamed(codec, ids, list(range(len(ids))), reason, tools)[1]


EMOJI = ["👍🏽", "你好", "naïve", "\u0301", "�", "🏳️‍🌈"]
PIECES = st.sampled_from(
    [
        *EMOJI,
        "<tool_call>",
        "</tool_call>",
        '{"name": "run", "arguments": {"a": "',
        '"}}',
        '{"name": "run", "parameters": {}}',
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|python_tag|>",
        "\n",
        '"',
        "\\",
        "{",
        "}",
        ";",
        "<tool",
        "hello ",
    ]
)
TEXT = st.lists(st.one_of(PIECES, st.text(st.characters(exclude_categories=["Cs"]), max_size=3)))
CUTS = st.lists(st.integers(0, 300), max_size=12)
REASON = st.sampled_from(["stop", "length", "abort"])
FAMILY = st.sampled_from(["qwen3", "qwen25", "llama31", "plain", "items"])


@examples(150)
@given(parts=TEXT, cuts=CUTS, reason=REASON, family=FAMILY, tools=st.booleans())
def test_the_cuts_do_not_matter(
    parts: list[str], cuts: list[int], reason: str, family: str, tools: bool, codec: Loader
) -> None:
    made, given_tools = codec(family), TOOLS if tools else None
    ids = made.encode("".join(parts))
    deltas, answer = streamed(made, ids, cuts, reason, given_tools)
    _, at_once = streamed(made, ids, [], reason, given_tools)
    assert answer == at_once == one_by_one(made, ids, reason, given_tools)
    assert answer == assemble(deltas, reason)


@examples(100)
@given(ids=st.lists(st.integers(0, 520), max_size=40), cuts=CUTS)
def test_any_ids_give_the_text_that_decoding_gives(
    ids: list[int], cuts: list[int], codec: Loader
) -> None:
    """Most such ids are no UTF-8; a final stop token is the one thing not shown."""
    made = codec("plain")
    ids = [one for one in ids if one < made.vocab_size]
    deltas, answer = streamed(made, ids, cuts, tools=None)
    shown = ids[:-1] if ids and ids[-1] in made.stop_token_ids else ids
    assert answer.content == made.decode(shown)
    assert all(delta.content for delta in deltas)


@examples(40)
@given(parts=st.lists(st.sampled_from(EMOJI), min_size=1))
def test_a_character_comes_whole(parts: list[str], codec: Loader) -> None:
    made = codec("plain")
    text = "".join(part for part in parts if part != "�")
    ids = made.encode(text)
    deltas, answer = streamed(made, ids, list(range(len(ids))))
    assert answer.content == text
    assert not any("�" in (delta.content or "") for delta in deltas)


@examples(100)
@given(parts=TEXT)
def test_nothing_said_is_lost(parts: list[str], codec: Loader) -> None:
    """Cut off in its middle, an answer with no call is its text, letter for letter."""
    made = codec("qwen25")
    text = "".join(parts) + "."
    answer = made.parse(made.encode(text), "length", TOOLS)
    if not answer.tool_calls:
        assert answer.content == text


def test_text_is_not_held_back_without_need(codec: Loader) -> None:
    made = codec("qwen25")
    stream = made.stream(TOOLS)
    assert stream.push(made.encode("a < b and more")) == [Delta(content="a < b and more")]
    assert stream.push(made.encode("<")) == []
    assert stream.push(made.encode("= c")) == [Delta(content="<= c")]
    assert stream.push([made.stop_token_ids[0]]) == []
    assert stream.finish("stop") == []


def test_a_call_comes_when_it_is_whole_and_at_once(codec: Loader) -> None:
    made = codec("qwen25")
    stream = made.stream(TOOLS, call_id=numbered())
    call = '<tool_call>\n{"name": "run", "arguments": {"a": 1}}\n'
    begun = [delta for one in made.encode(f"x\n{call}") for delta in stream.push([one])]
    assert begun == [Delta(content="x")]
    function = {"name": "run", "arguments": '{"a": 1}'}
    whole = {"index": 0, "id": "call_0", "type": "function", "function": function}
    assert stream.push(made.encode("</tool_call>")) == [Delta(tool_call=whole)]
    more = stream.push(made.encode(f"\n{call}</tool_call>"))
    assert more == [Delta(tool_call=whole | {"index": 1, "id": "call_1"})]
    assert stream.finish("stop") == []
    assert stream.answer.finish_reason == "tool_calls"
    ids = [one["id"] for one in stream.answer.tool_calls]
    assert ids == ["call_0", "call_1"] and "index" not in stream.answer.tool_calls[0]


def test_reasoning_comes_as_it_is_thought(codec: Loader) -> None:
    made = codec("qwen3")
    stream = made.stream(None)
    assert stream.push(made.encode("<think>\nI see")) == [Delta(reasoning="I see")]
    assert stream.push(made.encode("\n")) == []
    assert stream.push(made.encode("more\n</think>\n\n")) == [Delta(reasoning="\nmore")]
    assert stream.push(made.encode("yes")) == [Delta(content="yes")]
    assert stream.finish("length") == []
    assert stream.answer == ParsedAnswer("yes", "I see\nmore", [], "length")


def test_a_long_call_is_not_read_again_with_every_token(
    codec: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tried = codec("qwen25"), []

    def counted(text: str, start: int) -> Any:
        tried.append(start)
        return json_object(text, start)

    monkeypatch.setattr(hermes, "json_object", counted)
    body = '{"name": "run", "arguments": {"text": "' + "if (a < b) {} " * 300 + '"}}'
    answer = one_by_one(made, made.encode(f"<tool_call>{body}</tool_call>"), "stop")
    assert len(answer.tool_calls) == len(tried) == 1


@pytest.mark.parametrize("family", ["qwen3", "qwen25", "items"])
def test_tags_spelled_letter_by_letter(family: str, codec: Loader) -> None:
    made = codec(family)
    think = "hm\n</think>\n\n" if family == "items" else "<think>\nhm\n</think>\n\n"
    call = 'yes\n<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    letters = [one for letter in f"{think}{call}" for one in made.encode(letter)]
    answer = one_by_one(made, letters, "stop")
    assert answer == streamed(made, letters, [])[1]
    if family == "qwen25":
        assert answer.content == f"{think}yes"
    else:
        assert answer.reasoning == "hm"
    if family == "items":
        assert answer.content == call
    else:
        assert [one["id"] for one in answer.tool_calls] == ["call_0"]


def test_a_stop_token_that_did_not_stop_is_shown(codec: Loader) -> None:
    made = codec("plain")
    stream = made.stream()
    end = made.encode("<|im_end|>")
    assert stream.push(made.encode("a") + end) == [Delta(content="a")]
    assert stream.push(end) == [Delta(content="<|im_end|>")]
    assert stream.push(made.encode("b")) == [Delta(content="<|im_end|>b")]
    assert stream.finish("length") == []
