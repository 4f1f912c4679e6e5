"""OpenAI's chat completion: the JSON answer, and the chunks of a stream.

Invariant: a stream has exactly one chunk with a ``finish_reason``; usage comes in a chunk of its
own and only where it was asked for.
"""

from typing import Any

import orjson

from archon.codec import Delta, ParsedAnswer
from gateway.exchange import Exchange

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def model_of(exchange: Exchange) -> str:
    return exchange.request.model or exchange.target.policy_id


def completion(exchange: Exchange, answer: ParsedAnswer) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs(exchange, 0),
        "finish_reason": answer.finish_reason,
    }
    head = _head(exchange, "chat.completion")
    return orjson.dumps(head | {"choices": [choice], "usage": exchange.usage()})


class Chunks:
    """Makes the chunks of one stream. Log-probs go out with the text that follows them."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._head = _head(exchange, "chat.completion.chunk")
        self._told = 0

    def first(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        if delta.tool_call is not None:
            body: dict[str, Any] = {"tool_calls": [delta.tool_call]}
        elif delta.reasoning is not None:
            body = {"reasoning_content": delta.reasoning}
        else:
            body = {"content": delta.content}
        told = self._told
        self._told = len(self._exchange.output_ids)
        return self._chunk(body, None, logprobs(self._exchange, told))

    def last(self, finish_reason: str) -> bytes:
        rest = logprobs(self._exchange, self._told)
        chunk = self._chunk({}, finish_reason, rest if rest and rest["content"] else None)
        if self._exchange.request.include_usage:
            chunk += event(self._head | {"choices": [], "usage": self._exchange.usage()})
        return chunk + DONE

    def _chunk(
        self,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        # The weights of the newest token so far: they may change within one answer.
        self._head["system_fingerprint"] = _fingerprint(self._exchange)
        return event(self._head | {"choices": [choice]})


def logprobs(exchange: Exchange, start: int) -> dict[str, Any] | None:
    """What the client is shown, where it asked; nothing where the engine's do not fit its ids."""
    if not exchange.request.logprobs or len(exchange.logprobs) != len(exchange.output_ids):
        return None
    decode = exchange.served.codec.decode
    content = []
    pairs = zip(exchange.output_ids[start:], exchange.logprobs[start:], strict=True)
    for token_id, logprob in pairs:
        token = decode([token_id])
        entry = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
        content.append(entry | {"top_logprobs": []})
    return {"content": content, "refusal": None}


def _head(exchange: Exchange, kind: str) -> dict[str, Any]:
    return {
        "id": exchange.interaction_id,
        "object": kind,
        "created": int(exchange.started_at.timestamp()),
        "model": model_of(exchange),
        "system_fingerprint": _fingerprint(exchange),
    }


def _fingerprint(exchange: Exchange) -> str | None:
    version = exchange.version()
    return None if version is None else f"v{version}"
