"""Two ways to write the same conversation mean the same; two conversations do not."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archon.codec import messages_digest, normalise_messages, prefix_digests
from tests.codec.conversations import TOOLS, call, result, said, system, user
from tests.codec.examples import examples

BASE = [
    system("S"),
    user("w?"),
    said(None, call("run", '{"a": 1, "b": [1.5, true, null]}', "call_x_1"), reasoning="hm"),
    result("fine", "call_x_1"),
]


def changed(at: int, **keys: Any) -> list[Any]:
    return [{**m, **keys} if i == at else m for i, m in enumerate(BASE)]


def with_arguments(arguments: Any) -> list[Any]:
    return changed(2, tool_calls=[call("run", arguments, "call_x_1")])


RENAMED = changed(2, tool_calls=[call("run", '{"a": 1, "b": [1.5, true, null]}', "callx1")])[:3]

SAME = [
    changed(0, role="developer"),
    changed(1, content=[{"type": "text", "text": "w?"}]),
    changed(1, content=[{"type": "text", "text": "w", "cache_control": {}}, "?"]),
    changed(1, id="msg_1", refusal=None, metadata={"time": 1}),
    changed(2, content=""),
    changed(2, content=[], annotations=[], audio=None, function_call=None),
    with_arguments('{"b":[1.5,true,null],"a":1.0}'),
    with_arguments({"b": [1.5, True, None], "a": 1}),
    [*RENAMED, result("fine", "callx1")],
]
OTHER = [
    changed(0, content="T"),
    changed(0, role="user"),
    changed(1, name="bob"),
    changed(1, content="w? "),
    changed(2, content="ok"),
    changed(2, reasoning_content="no"),
    changed(2, reasoning_content=None),
    changed(2, tool_calls=None),
    with_arguments('{"a": 1, "b": [1.5, 1, null]}'),
    with_arguments('{"a": "1", "b": [1.5, true, null]}'),
    with_arguments('{"a": 1, "b": [true, 1.5, null]}'),
    with_arguments('{"a": 1, "b": [1.5, true, null]'),
    changed(2, tool_calls=[call("walk", '{"a": 1, "b": [1.5, true, null]}', "call_x_1")]),
    changed(3, content="bad"),
    changed(3, tool_call_id="another"),
    BASE[:3],
    [*BASE, said("ok")],
    [BASE[0], BASE[1], BASE[2], BASE[2], BASE[3]],
]


@pytest.mark.parametrize("messages", SAME)
def test_the_same(messages: list[Any]) -> None:
    assert messages != BASE
    assert normalise_messages(messages) == normalise_messages(BASE)
    assert messages_digest(messages, TOOLS) == messages_digest(BASE, TOOLS)


@pytest.mark.parametrize("messages", OTHER)
def test_another(messages: list[Any]) -> None:
    assert messages_digest(messages, TOOLS) != messages_digest(BASE, TOOLS)


def test_reasoning_can_be_looked_away_from() -> None:
    for without in (changed(2, reasoning_content=None), changed(2, reasoning_content="no")):
        ours = messages_digest(without, reasoning=False)
        assert ours == messages_digest(BASE, reasoning=False)
    moved = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in BASE]
    moved[2]["reasoning"] = "hm"
    assert messages_digest(moved) == messages_digest(BASE)


def test_tools_are_part_of_the_meaning() -> None:
    turned = [{key: tool[key] for key in reversed(tool)} for tool in TOOLS]
    marked = [{**tool, "cache_control": {"type": "ephemeral"}} for tool in TOOLS]
    assert messages_digest(BASE, turned) == messages_digest(BASE, TOOLS)
    assert messages_digest(BASE, marked) == messages_digest(BASE, TOOLS)
    assert messages_digest(BASE, TOOLS[::-1]) != messages_digest(BASE, TOOLS)
    assert messages_digest(BASE, TOOLS[:1]) != messages_digest(BASE, TOOLS)
    assert messages_digest(BASE, []) == messages_digest(BASE) != messages_digest(BASE, TOOLS)


def test_digests_of_all_beginnings_in_one_pass() -> None:
    whole = [*BASE, said("ok", call("run", "{}", "call_x_1")), result("y", "call_x_1")]
    digests = prefix_digests(whole, TOOLS)
    assert digests == [messages_digest(whole[: k + 1], TOOLS) for k in range(len(whole))]
    assert len(set(digests)) == len(whole)
    assert normalise_messages(whole)[:3] == normalise_messages(whole[:3])


def test_two_calls_keep_their_order_and_their_results() -> None:
    one, two = call("run", '{"n":1}', "a"), call("run", '{"n":2}', "b")
    sent = [user("x"), said(None, one, two), result("1", "a"), result("2", "b")]
    stored = json.loads(json.dumps(normalise_messages(sent)))
    assert [c["function"]["arguments"] for c in stored[1]["tool_calls"]] == [{"n": 1}, {"n": 2}]
    assert messages_digest(stored) == messages_digest(sent)
    swapped = [user("x"), said(None, two, one), result("1", "a"), result("2", "b")]
    crossed = [user("x"), said(None, one, two), result("1", "b"), result("2", "a")]
    digests = {messages_digest(messages) for messages in (sent, swapped, crossed)}
    assert len(digests) == 3


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@examples(50)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_arguments_compare_as_json(arguments: dict[str, Any]) -> None:
    compact = json.dumps(arguments, separators=(",", ":"), sort_keys=True)
    python = json.dumps(arguments, ensure_ascii=False)
    indented = json.dumps(dict(reversed(arguments.items())), indent=2)
    digests = {messages_digest(with_arguments(a)) for a in (compact, python, indented, arguments)}
    assert len(digests) == 1
    more = messages_digest(with_arguments({**arguments, "one more": 1}))
    assert (more in digests) == (arguments.get("one more") == 1)


def test_normal_messages_are_their_own_normal_form() -> None:
    for messages in (BASE, *SAME, *OTHER):
        once = normalise_messages(messages)
        assert normalise_messages(once) == once


def test_the_callers_messages_are_left_alone() -> None:
    before = json.dumps(BASE)
    normalise_messages(BASE)
    prefix_digests(BASE, TOOLS, reasoning=False)
    assert json.dumps(BASE) == before
