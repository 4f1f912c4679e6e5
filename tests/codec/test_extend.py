"""An earlier answer's sampled ids stand in the next prompt, or the prompt is made anew."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from archon.codec import Codec, messages_digest
from tests.codec.conftest import Loader
from tests.codec.conversations import TOOLS, result, said, system, user
from tests.codec.examples import examples
from tests.codec.models import write_model


def answered(codec: Codec, messages: list[Any], text: str, tools: Any = None) -> tuple[Any, ...]:
    """As a gateway does it: prompt ids, output ids, the message that the client was given."""
    output = codec.encode(text)
    message = codec.answer_message(codec.parse(output, "stop", tools))
    return codec.render(messages, tools), output, message


@pytest.mark.parametrize("family", ["qwen3", "qwen25", "plain", "llama31"])
def test_the_end_of_a_turn_is_completed_as_the_template_writes_it(
    family: str, codec: Loader
) -> None:
    made = codec(family)
    end = "<|eot_id|>" if family == "llama31" else "<|im_end|>"
    messages = [system("S"), user("hi")]
    prompt, output, answer = answered(made, messages, f"hello there{end}")
    assert answer == said("hello there")
    after = [*messages, answer, user("and?")]
    new = made.extend(prompt, output, after[:3], after, None)
    assert new == made.render(after, None)
    assert new[: len(prompt) + len(output)] == prompt + output


@pytest.mark.parametrize("family", ["qwen3", "qwen25", "plain", "llama31"])
def test_an_answer_cut_off_is_closed_whole(family: str, codec: Loader) -> None:
    made = codec(family)
    prompt, output, _ = answered(made, [user("hi")], "hello the")
    after = [user("hi"), said("hello the"), user("go on")]
    new = made.extend(prompt, output, after[:2], after, None)
    assert new == made.render(after, None)


def test_another_end_token_does_not_close_the_turn(codec: Loader) -> None:
    made = codec("qwen3")
    prompt, output, answer = answered(made, [user("hi")], "hello<|endoftext|>")
    assert answer == said("hello")
    after = [user("hi"), answer, user("go on")]
    new = made.extend(prompt, output, after[:2], after, None)
    tail = made.encode("<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    assert new == prompt + output + tail


def spelled_letter_by_letter(codec: Codec, text: str) -> list[int]:
    return [token for letter in text for token in codec.encode(letter)]


@pytest.mark.parametrize("family", ["qwen3", "qwen25", "llama31", "plain"])
def test_the_sampled_spelling_stands_through_two_turns(family: str, codec: Loader) -> None:
    made = codec(family)
    end = made.encode("<|eot_id|>" if family == "llama31" else "<|im_end|>")
    messages = [user("who?")]
    prompt = made.render(messages, None)
    for text in ("Pantom", "Phantom"):
        output = spelled_letter_by_letter(made, text) + end
        assert output[:-1] != made.encode(text)
        answer = made.answer_message(made.parse(output, "stop", None))
        assert answer == said(text)
        after = [*messages, answer, user("again")]
        new = made.extend(prompt, output, after[:-1], after, None)
        assert new is not None and new[: len(prompt) + len(output)] == prompt + output
        assert new != made.render(after, None)
        assert made.decode(new) == made.decode(made.render(after, None))
        messages, prompt = after, new


CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Paris", "days":1}}\n</tool_call>'
)


@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("qwen25", ""),
        ("qwen25", "Let me look.\n"),
        ("qwen25", "Let me look.  \n\n"),
        ("qwen3", "<think>\nI look\n</think>\n\n"),
        ("qwen3", "<think>I look</think>Let me look."),
    ],
)
def test_a_call_sampled_in_another_spelling_stands(family: str, before: str, codec: Loader) -> None:
    made, messages = codec(family), [user("w?")]
    prompt, output, answer = answered(made, messages, f"{before}{CALL}<|im_end|>", TOOLS)
    (given,) = answer["tool_calls"]
    function = {"name": "get_weather", "arguments": '{"days":1.0,"city":"Paris"}'}
    back = {**answer, "tool_calls": [{"id": "renamed", "type": "function", "function": function}]}
    after = [*messages, back, result("fine", "renamed")]
    assert after[1:] != [answer, result("fine", given["id"])]
    new = made.extend(prompt, output, [*messages, answer], after, TOOLS)
    tail = "\n<|im_start|>user\n<tool_response>\nfine\n</tool_response><|im_end|>\n"
    assert new == prompt + output + made.encode(f"{tail}<|im_start|>assistant\n")


def test_a_call_that_is_no_json_stands_as_text(codec: Loader) -> None:
    made, messages = codec("qwen25"), [user("w?")]
    broken = 'x\n<tool_call>\n{"name": "run", "arguments": {a}}\n</tool_call>'
    prompt, output, answer = answered(made, messages, f"{broken}<|im_end|>", TOOLS)
    assert answer == said(broken)
    after = [*messages, answer, user("no such call")]
    assert made.extend(prompt, output, after[:2], after, TOOLS) == made.render(after, TOOLS)


def test_a_python_tag_stands(codec: Loader) -> None:
    made, messages = codec("llama31"), [user("w?")]
    text = '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>'
    prompt, output, answer = answered(made, messages, text, TOOLS)
    assert answer["content"] is None and len(answer["tool_calls"]) == 1
    after = [*messages, answer, result("fine", answer["tool_calls"][0]["id"])]
    new = made.extend(prompt, output, after[:2], after, TOOLS)
    tail = '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"fine"<|eot_id|>'
    head = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert new == prompt + output + made.encode(tail + head)


def test_reasoning_that_the_template_drops_makes_a_fork(codec: Loader) -> None:
    made, messages = codec("qwen3"), [user("a")]
    text = "<think>\nhm\n</think>\n\none<|im_end|>"
    prompt, output, answer = answered(made, messages, text)
    assert answer == said("one", reasoning="hm")
    after = [*messages, answer, user("b")]
    assert made.extend(prompt, output, after[:2], after, None) is None
    assert "hm" not in made.decode(made.render(after, None))


def test_a_prompt_that_opens_thinking_which_the_past_does_not_show_makes_a_fork(
    codec: Loader,
) -> None:
    made, messages = codec("items"), [user("a")]
    prompt, output, answer = answered(made, messages, "hm\n</think>\n\none<|end|>")
    assert answer == said("one", reasoning="hm")
    for back in (answer, said("one")):
        after = [*messages, back, user("b")]
        assert made.extend(prompt, output, after[:2], after, None) is None


def test_reasoning_within_a_run_of_tools_stands_and_ends_with_it(codec: Loader) -> None:
    made, messages = codec("qwen3"), [user("a")]
    prompt, output, answer = answered(
        made, messages, f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>", TOOLS
    )
    running = [*messages, answer, result("ok", answer["tool_calls"][0]["id"])]
    second = made.extend(prompt, output, running[:2], running, TOOLS)
    assert second is not None and "hm" in made.decode(second)
    output2 = made.encode("<think>\nso\n</think>\n\ndone<|im_end|>")
    answer2 = made.answer_message(made.parse(output2, "stop", TOOLS))
    over = [*running, answer2, user("b")]
    assert made.extend(second, output2, over[:4], over, TOOLS) is None


def test_reasoning_that_the_client_drops_makes_a_fork(codec: Loader) -> None:
    made, messages = codec("qwen3"), [user("a")]
    text = f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>"
    prompt, output, answer = answered(made, messages, text, TOOLS)
    bare = {key: value for key, value in answer.items() if key != "reasoning_content"}
    after = [*messages, bare, result("ok", answer["tool_calls"][0]["id"])]
    assert made.extend(prompt, output, [*messages, answer], after, TOOLS) is None


@pytest.mark.parametrize(
    "changed",
    [
        [user("HI"), said("hello"), user("b")],
        [user("hi"), said("hello "), user("b")],
        [system("new"), user("hi"), said("hello"), user("b")],
        [user("hi"), user("note"), said("hello"), user("b")],
        [user("hi"), said("hello")],
        [user("hi")],
    ],
)
def test_a_changed_past_makes_a_fork(changed: list[Any], codec: Loader) -> None:
    made = codec("plain")
    prompt, output, answer = answered(made, [user("hi")], "hello<|im_end|>")
    assert made.extend(prompt, output, [user("hi"), answer], changed, None) is None


def test_the_same_meaning_in_another_form_stands(codec: Loader) -> None:
    made = codec("plain")
    prompt, output, answer = answered(made, [user("hi")], "hello<|im_end|>")
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    back: dict[str, Any] = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
    }
    after = [user([block]), back, user("b")]
    new = made.extend(prompt, output, [user("hi"), answer], after, None)
    assert new == made.render([user("hi"), said("hello"), user("b")], None)


def test_a_turn_without_a_break_at_the_end_of_the_conversation(codec: Loader) -> None:
    made = codec("alternating")
    prompt, output, answer = answered(made, [user("a")], " one</s>")
    after = [user("a"), answer, user("b")]
    assert made.extend(prompt, output, after[:2], after, None) == made.render(after, None)


def test_an_answer_of_which_the_template_trims_some_stands(codec: Loader) -> None:
    made = codec("llama31")
    prompt, output, answer = answered(made, [user("a")], "  one \n\n<|eot_id|>")
    assert answer == said("  one \n\n")
    after = [user("a"), answer, user("b")]
    new = made.extend(prompt, output, after[:2], after, None)
    tail = "<|start_header_id|>user<|end_header_id|>\n\nb<|eot_id|>"
    head = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert new == prompt + output + made.encode(tail + head)


def test_a_turn_that_ends_in_two_ways_makes_a_fork(tmp_path: Path) -> None:
    """Only the end of a plain answer is known; that of a call is another here."""
    ends = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        "{{ c.function | tojson }}\n</tool_call>{% endfor %}"
        "{{ '<|im_start|>' if m.tool_calls else '<|im_end|>' }}{% endfor %}{{ '' if tools }}"
    )
    made = Codec.load(write_model(tmp_path, "qwen25", ends))
    for text in ("one", f" {CALL}"):
        prompt, output, answer = answered(made, [user("a")], f"{text}<|im_end|>", TOOLS)
        after = [user("a"), answer, user("b")]
        new = made.extend(prompt, output, after[:2], after, TOOLS)
        assert (new is None) == (text != "one")


def test_a_template_that_hides_answers_never_extends(tmp_path: Path) -> None:
    hiding = (
        "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_end|>{% endif %}"
    )
    made = Codec.load(write_model(tmp_path, "plain", hiding))
    prompt, output, answer = answered(made, [user("a")], "one")
    after = [user("a"), answer, user("b")]
    assert made.extend(prompt, output, after[:2], after, None) is None


@pytest.mark.parametrize("end", ["</s>", "c"])
def test_a_tokenizer_that_treats_a_beginning_apart(end: str, tmp_path: Path) -> None:
    """SentencePiece-like: a space is put before a text, and must not be put before a tail."""
    template = (
        "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' "
        f"else m.content + '{end}' }}}}{{% endfor %}}"
    )
    folder = write_model(tmp_path, "alternating", template)
    words = ["<unk>", "▁", *(space + word for word in "abc" for space in ("", "▁"))]
    vocabulary = {word: at for at, word in enumerate([*words, "<s>", "</s>", "[INST]", "[/INST]"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in [*vocabulary][-4:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    made = Codec.load(folder)
    prompt, output = made.render([user("a")], None), [vocabulary["b"]]
    after = [user("a"), said("b"), user("c")]
    new = made.extend(prompt, output, after[:2], after, None)
    assert new == prompt + output + [vocabulary[one] for one in (end, "[INST]", "c", "[/INST]")]


def test_an_end_token_that_swallows_the_break_after_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "plain")
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    made = Codec.load(folder)
    prompt, output, answer = answered(made, [user("hi")], "hello<|im_end|>")
    after = [user("hi"), answer, user("b")]
    assert made.extend(prompt, output, after[:2], after, None) == made.render(after, None)


def test_an_end_of_turn_that_is_an_ordinary_token(tmp_path: Path) -> None:
    lines = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    folder = write_model(tmp_path, "plain", lines)
    (end,) = Codec.load(folder).encode("\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][0]["rstrip"] = True  # it would swallow the break
    (folder / "tokenizer.json").write_text(json.dumps(content))
    made = Codec.load(folder)
    prompt, output, answer = answered(made, [user("hi")], "hello\n")
    assert answer == said("hello")
    after = [user("hi"), answer, user("b")]
    new = made.extend(prompt, output, after[:2], after, None)
    tail = made.encode("user: b\nassistant: ")
    assert new == prompt + output + tail
    cut = made.encode("hello")
    assert made.extend(prompt, cut, after[:2], after, None) == prompt + cut + [end] + tail


WORDS = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "low", "high", "1", "2", "3", "4"]
GAME = (
    "{%- for m in messages -%}{{- '<' + m.role + '> ' + m.content + ' ' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
)


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """A word is a token, roles are tokens, nothing ends a turn."""
    folder = tmp_path_factory.mktemp("game")
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:5]])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(GAME)
    return Codec.load(folder)


@examples(50)
@given(moves=st.lists(st.integers(0, len(WORDS) - 1), min_size=3, max_size=3))
def test_a_game_of_single_tokens_is_one_sequence(moves: list[int], game: Codec) -> None:
    assert game.stop_token_ids == ()
    messages, sequence = [user("low")], [3, 5, 4]
    assert game.render(messages, None) == sequence
    for move in moves:
        answer = game.answer_message(game.parse([move], "length", None))
        assert answer["content"] == WORDS[move]
        after = [*messages, answer, user("high")]
        new = game.extend(sequence, [move], after[:-1], after, None)
        assert new == [*sequence, move, 3, 6, 4]
        messages, sequence = after, new


def test_no_two_moves_look_alike(game: Codec) -> None:
    answers = [game.answer_message(game.parse([at], "length", None)) for at in range(len(WORDS))]
    assert len({messages_digest([user("low"), answer]) for answer in answers}) == len(WORDS)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@examples(100)
@given(
    text=TEXT,
    ask=TEXT,
    cuts=st.lists(st.integers(0, 40)),
    family=st.sampled_from(["qwen25", "qwen3", "llama31", "plain"]),
    stopped=st.booleans(),
)
def test_whatever_was_sampled_stands_unchanged(
    text: str, ask: str, cuts: list[int], family: str, stopped: bool, codec: Loader
) -> None:
    """The text is encoded in pieces, so its spelling is seldom the tokenizer's own."""
    made = codec(family)
    marks = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    output = [i for a, b in zip(marks, marks[1:], strict=False) for i in made.encode(text[a:b])]
    output += [made.stop_token_ids[-1 if family == "llama31" else 0]] if stopped else []
    prompt = made.render([user(ask)], None)
    reason = "stop" if stopped else "length"
    answer = made.answer_message(made.parse(output, reason, None))
    after = [user(ask), answer, user("next")]
    new = made.extend(prompt, output, after[:2], after, None)
    assert new is not None
    assert new[: len(prompt) + len(output)] == prompt + output
    tail = made.render([user("x"), said("y"), user("next")], None)
    closed = made.render([user("x"), said("y")], None, add_generation_prompt=False)
    assert new[len(prompt) + len(output) :][-(len(tail) - len(closed)) :] == tail[len(closed) :]
