"""What a model's folder says: stops, limits, templates; and what is missing from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.codec import Codec
from tests.codec.conversations import TOOLS, user
from tests.codec.models import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path, "plain")


def edit(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def stops(folder: Path) -> set[str]:
    codec = Codec.load(folder)
    return {codec.decode([token]) for token in codec.stop_token_ids}


def test_every_source_of_stop_tokens_counts(folder: Path) -> None:
    assert stops(folder) == {"<|im_end|>", "<|endoftext|>"}
    (folder / "generation_config.json").unlink()
    assert stops(folder) == {"<|im_end|>"}
    end = Codec.load(folder).encode("<|endoftext|>")[0]
    edit(folder, "config.json", lambda content: content.update(eos_token_id=end))
    assert stops(folder) == {"<|im_end|>", "<|endoftext|>"}


def test_what_the_template_ends_a_turn_with_is_a_stop_token(folder: Path) -> None:
    """As of a base model under a chat template: its own end token is another."""
    (folder / "generation_config.json").unlink()
    edit(folder, "tokenizer_config.json", lambda c: c.update(eos_token="<|endoftext|>"))
    assert stops(folder) == {"<|im_end|>", "<|endoftext|>"}


def test_limits(folder: Path) -> None:
    assert Codec.load(folder).max_len_hint == 2048
    edit(folder, "config.json", dict.clear)
    assert Codec.load(folder).max_len_hint == 4096
    edit(folder, "tokenizer_config.json", lambda c: c.update(model_max_length=10**30))
    assert Codec.load(folder).max_len_hint is None


def test_the_digest_follows_tokenizer_template_and_specials(folder: Path) -> None:
    digests = [Codec.load(folder).digest]
    assert Codec.load(folder).digest == digests[0]
    edit(folder, "tokenizer_config.json", lambda c: c.update(unk_token="<|im_start|>"))
    digests.append(Codec.load(folder).digest)
    edit(folder, "tokenizer.json", lambda c: c["model"]["merges"].pop())
    digests.append(Codec.load(folder).digest)
    (folder / "generation_config.json").unlink()
    digests.append(Codec.load(folder).digest)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    digests.append(Codec.load(folder).digest)
    assert len(set(digests)) == 5


def test_a_template_file_wins_and_named_templates_are_known(folder: Path) -> None:
    both = [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "<tool_call>{{ tools | tojson }}"},
    ]
    edit(folder, "tokenizer_config.json", lambda c: c.update(chat_template=both))
    codec = Codec.load(folder)
    assert codec.decode(codec.render([user("x")], None)) == "a"
    assert "get_weather" in codec.decode(codec.render([user("x")], TOOLS))
    (folder / "chat_template.jinja").write_text("b")
    codec = Codec.load(folder)
    assert codec.decode(codec.render([user("x")], None)) == "b"


def test_special_tokens_of_the_older_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    edit(folder, "tokenizer_config.json", lambda c: c.pop("bos_token"))
    bos = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|endoftext|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(bos))
    codec = Codec.load(folder)
    assert codec.decode(codec.render([user("x")], None)) == "<|im_start|><|im_end|>"


def test_truncation_and_padding_of_the_tokenizer_are_off(folder: Path) -> None:
    def cut(content: dict[str, Any]) -> None:
        content["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }

    whole = Codec.load(folder).encode("one two three four five six")
    edit(folder, "tokenizer.json", cut)
    assert Codec.load(folder).encode("one two three four five six") == whole


def test_what_is_missing_is_named(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", lambda c: c.pop("chat_template"))
    with pytest.raises(ValueError, match="no chat template"):
        Codec.load(folder)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="chat template, line 1"):
        Codec.load(folder)
    (folder / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        Codec.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Codec.load(folder)
