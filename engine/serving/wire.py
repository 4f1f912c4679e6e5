"""Requests and answers of docs/protocol.md, read and written. No torch.

Invariant: what cannot be honoured is refused with its name; nothing in a request is ignored
silently except `model`, since an engine serves one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from archon.inference.protocol import ranges_of

KNOWN_SAMPLING = {
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop_token_ids",
    "n",
    "logprobs",
    "prompt_logprobs",
}


class Refusal(Exception):
    """An error answer: `code` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: frozenset[int]
    prompt_logprobs: bool
    stream: bool

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(slots=True)
class Output:
    """Tokens of an answer from number `start` on. `error` ends it instead of a reason."""

    start: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None = None
    error: str | None = None
    prompt_logprobs: list[float] | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise Refusal(400, f"the body is not JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise Refusal(400, "the body must be a JSON object")
    return parsed


def parse_generate(body: bytes, vocab_size: int, max_model_len: int) -> Request:
    raw = parse_json(body)
    sampling = raw.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise Refusal(400, "sampling_params must be an object")
    if unknown := sampling.keys() - KNOWN_SAMPLING:
        raise Refusal(400, f"unsupported sampling parameters: {', '.join(sorted(unknown))}")
    token_ids = _ids(raw.get("token_ids"), "token_ids", vocab_size)
    room = max_model_len - len(token_ids)
    if not token_ids:
        raise Refusal(400, "token_ids is empty")
    if room < 1:
        raise Refusal(
            400,
            f"the prompt has {len(token_ids)} tokens; the maximum context length is "
            f"{max_model_len} and at least one token must be left for the answer",
        )
    if sampling.get("n", 1) != 1:
        raise Refusal(400, "n must be 1")
    if sampling.get("logprobs", 1) not in (0, 1, None):
        raise Refusal(400, "logprobs must be 1: the sampled token's only")
    if sampling.get("prompt_logprobs") not in (0, None):
        raise Refusal(400, "prompt_logprobs must be 0 or null: the prompt's own tokens only")
    if sampling.get("prompt_logprobs") is not None and raw.get("stream"):
        raise Refusal(400, "prompt_logprobs needs stream: false")
    stop = _ids(sampling.get("stop_token_ids") or [], "stop_token_ids", vocab_size)
    return Request(
        request_id=str(raw.get("request_id", "")),
        token_ids=token_ids,
        max_tokens=min(room, _integer(sampling, "max_tokens", 1, None) or room),
        temperature=_number(sampling, "temperature", 1.0, 0.0, 100.0),
        top_p=_top_p(sampling),
        top_k=_integer(sampling, "top_k", -1, 0) or 0,
        seed=_integer(sampling, "seed", None, None),
        stop=frozenset(stop),
        prompt_logprobs=sampling.get("prompt_logprobs") is not None,
        stream=bool(raw.get("stream", False)),
    )


def _ids(value: object, name: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise Refusal(400, f"{name} must be a list of integers")
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        raise Refusal(400, f"{name} must lie in 0 to {vocab_size - 1}, the model's vocabulary")
    return value


def _integer(
    sampling: dict[str, Any], name: str, low: int | None, default: int | None
) -> int | None:
    value = sampling.get(name)
    if value is None:
        return default
    if type(value) is not int or (low is not None and value < low):
        bound = "" if low is None else f" of at least {low}"
        raise Refusal(400, f"{name} must be an integer{bound}, not {value!r}")
    return value


def _number(sampling: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = sampling.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise Refusal(400, f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
    return float(value)


def _top_p(sampling: dict[str, Any]) -> float:
    top_p = _number(sampling, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise Refusal(400, "top_p must be above 0")
    return top_p


def choice(output: Output) -> dict[str, Any]:
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return {
        "index": 0,
        "token_ids": output.token_ids,
        "logprobs": {"content": [{"token": f"token_id:{i}", "logprob": p} for i, p in pairs]},
        "finish_reason": output.finish_reason,
        "weight_versions": [
            {"version": str(r.version), "start": r.start, "end": r.end}
            for r in ranges_of(output.versions, output.start)
        ],
    }


def event(request_id: str, output: Output) -> bytes:
    """One event of a stream; the last one brings `[DONE]` with it unless it is an error."""
    if output.error is not None:
        return b"data: %b\n\n" % orjson.dumps(error_body(500, output.error))
    body = orjson.dumps({"request_id": request_id, "choices": [choice(output)]})
    return b"data: %b\n\n%b" % (body, b"data: [DONE]\n\n" if output.last else b"")


def whole(request: Request, output: Output) -> bytes:
    prompt: list[dict[str, dict[str, float]] | None] | None = None
    if output.prompt_logprobs is not None:
        following = request.token_ids[1:]
        prompt = [None]
        prompt += [
            {str(i): {"logprob": p}} for i, p in zip(following, output.prompt_logprobs, strict=True)
        ]
    answer = {"request_id": request.request_id, "choices": [choice(output)]}
    return orjson.dumps(answer | {"prompt_logprobs": prompt})


def error_body(code: int, message: str) -> dict[str, Any]:
    kind = {400: "invalid_request", 401: "unauthorized", 404: "not_found", 409: "version_conflict"}
    return {"error": {"message": message, "type": kind.get(code, "engine"), "code": code}}


def join(outputs: Sequence[Output]) -> Output:
    """Consecutive outputs as one."""
    first, last = outputs[0], outputs[-1]
    if len(outputs) == 1:
        return first
    return Output(
        start=first.start,
        token_ids=[i for o in outputs for i in o.token_ids],
        logprobs=[p for o in outputs for p in o.logprobs],
        versions=[v for o in outputs for v in o.versions],
        finish_reason=last.finish_reason,
        error=last.error,
        prompt_logprobs=first.prompt_logprobs,
    )
