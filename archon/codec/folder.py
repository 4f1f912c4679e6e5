"""What a model's folder says about its tokenizer, its template and its limits.

Invariant: the same files that `transformers` would read, in the same precedence.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_UNLIMITED = 10**9


@dataclass(frozen=True)
class ModelFolder:
    tokenizer: Tokenizer
    tokenizer_json: bytes
    template: str
    tool_template: str | None
    special_tokens: dict[str, str]
    stop_token_ids: tuple[int, ...]
    max_len: int | None


def read_folder(path: str | Path) -> ModelFolder:
    """ValueError, naming the file, where something is missing or cannot be read."""
    folder = Path(path)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: no tokenizer.json")
    data = (folder / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _read(folder / "tokenizer_config.json")
    model = _read(folder / "config.json")
    special = _special_tokens(settings, _read(folder / "special_tokens_map.json"))
    template, tool_template = _templates(folder, settings)
    return ModelFolder(
        tokenizer=tokenizer,
        tokenizer_json=data,
        template=template,
        tool_template=tool_template,
        special_tokens=special,
        stop_token_ids=_stop_ids(folder, tokenizer, model, special),
        max_len=_max_len(settings, model),
    )


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: not a JSON object")
    return content


def _special_tokens(settings: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        key = f"{name}_token"
        token = settings[key] if key in settings else older.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[key] = token
    return found


def _templates(folder: Path, settings: dict[str, Any]) -> tuple[str, str | None]:
    """The template, and the one for requests with tools where the model has two."""
    named: dict[str, str] = {}
    given = settings.get("chat_template")
    if isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        named = {entry["name"]: entry["template"] for entry in given}
    file = folder / "chat_template.jinja"
    if file.is_file():
        named = {"default": file.read_text("utf-8")}
        for extra in (folder / "additional_chat_templates").glob("*.jinja"):
            named[extra.stem] = extra.read_text("utf-8")
    if "default" not in named:
        raise ValueError(f"{folder}: no chat template; put one into chat_template.jinja")
    return named["default"], named.get("tool_use")


def _stop_ids(
    folder: Path, tokenizer: Tokenizer, model: dict[str, Any], special: dict[str, str]
) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (_read(folder / "generation_config.json"), model):
        given = source.get("eos_token_id")
        ids += given if isinstance(given, list) else [] if given is None else [given]
    if "eos_token" in special:
        named = tokenizer.token_to_id(special["eos_token"])
        ids += [] if named is None else [named]
    return tuple(dict.fromkeys(ids))


def _max_len(settings: dict[str, Any], model: dict[str, Any]) -> int | None:
    given = (settings.get("model_max_length"), model.get("max_position_embeddings"))
    known = [int(length) for length in given if length is not None and length < _UNLIMITED]
    return min(known, default=None)
