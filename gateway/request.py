"""An OpenAI chat completion request, read and checked.

Invariant: a field either acts, or is known to be harmless, or is refused by its name. Nothing that
would change what is sampled is ignored.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import ApiError, invalid

# Values that say nothing: a client that sends them gets what it asked for.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "stop": ("", []),
    "tool_choice": ("auto",),
    "functions": ([],),
    "function_call": ("auto",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "top_logprobs": (0,),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "echo": (False,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "parallel_tool_calls": (True,),
}
WIDEST_TOP_K = (0, -1)


@dataclass(slots=True)
class ChatRequest:
    """``max_tokens`` is None where the client set no limit."""

    model: str
    messages: list[Any]
    tools: list[Any] | None
    stream: bool
    include_usage: bool
    logprobs: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    max_tokens: int | None


def read_json(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = _read_loosely(body)
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object")
    return fields


def _read_loosely(body: bytes) -> Any:
    """Half a surrogate pair, which JavaScript clients can send, is read as U+FFFD."""
    try:
        return _well_formed(json.loads(body, parse_constant=_no_number))
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from error


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _well_formed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_well_formed(item) for item in value]
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return value


def read_chat(body: bytes) -> ChatRequest:
    fields = read_json(body)
    _refuse(fields)
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise invalid("tools must be a list", "tools")
    model = fields.get("model")
    stream_options = fields.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    top_k = _integer(fields, "top_k", -1, 1 << 31)
    return ChatRequest(
        model=model if isinstance(model, str) else "",
        messages=fields.get("messages"),  # type: ignore[arg-type]  # the codec checks them
        tools=tools or None,
        stream=_flag(fields, "stream"),
        include_usage=bool(stream_options.get("include_usage")),
        logprobs=_flag(fields, "logprobs"),
        temperature=_number(fields, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(fields, "top_p", 1.0, 1e-9, 1.0),
        top_k=0 if top_k in WIDEST_TOP_K or top_k is None else top_k,
        seed=_integer(fields, "seed", -(1 << 63), (1 << 63) - 1),
        max_tokens=_limit(fields),
    )


def _refuse(fields: dict[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            shown = orjson.dumps(value).decode()[:200]
            raise ApiError(
                400,
                f"{name} = {shown} is not supported here: leave it out",
                param=name,
                code="unsupported_parameter",
            )


def _limit(fields: dict[str, Any]) -> int | None:
    """``max_completion_tokens`` is the newer name of ``max_tokens``; the lower of both holds."""
    limits = [
        limit
        for name in ("max_completion_tokens", "max_tokens")
        if (limit := _integer(fields, name, 1, 1 << 62)) is not None
    ]
    return min(limits, default=None)


def _number(fields: dict[str, Any], name: str, otherwise: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise invalid(f"{name} must be a number", name)
    if not low <= value <= high:
        raise invalid(f"{name} = {value}: must be between {low:g} and {high:g}", name)
    return float(value)


def _integer(fields: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(f"{name} must be a whole number", name)
    if not low <= value <= high:
        raise invalid(f"{name} = {value}: must be between {low} and {high}", name)
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value in (None, False, True):  # 0 and 1 too
        return bool(value)
    raise invalid(f"{name} must be true or false", name)
