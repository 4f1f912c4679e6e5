"""The client of the token-level inference protocol.

Invariant: a stream that this client ends without raising was ended by the engine with `[DONE]`
and a finish reason; every other ending is an `EngineDied` that counts what had come.
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlencode

import orjson

from archon.inference.errors import (
    EngineDied,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    VersionConflict,
)
from archon.inference.http import Connection, ConnectionBroken, Pool
from archon.inference.protocol import (
    EngineVersions,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    PromptLogprobs,
    SamplingParams,
    UpdateResult,
    merge_ranges,
    parse_choice,
    parse_prompt_logprobs,
    parse_versions,
)

GENERATE = "/inference/v1/generate"


class EngineClient:
    """One engine replica. Belongs to one event loop; `aclose` it."""

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        connect_timeout_s: float = 2.0,
        idle_timeout_s: float = 600.0,
    ) -> None:
        """`idle_timeout_s` bounds the silence between two parts of an answer, not its length."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.base_url = base_url
        self._idle_timeout_s = idle_timeout_s
        self._pool = Pool(base_url, headers, connect_timeout_s)

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._pool.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk]:
        """Stream an answer. Leaving early (cancellation, `aclose`) closes the connection at once,
        which aborts the request in the engine; after a `break` call `aclose` yourself."""
        connection = await self._exchange("POST", GENERATE, request.body())
        received = 0
        finish_reason: str | None = None
        try:
            async for event in self._events(connection):
                chunk = self._chunk(event, received)
                received += len(chunk.token_ids)
                finish_reason = chunk.finish_reason
                yield chunk
            if finish_reason is None:
                raise EngineDied(self.base_url, "[DONE] without a finish reason", received)
        except ConnectionBroken as e:
            raise EngineDied(self.base_url, str(e), received) from e
        finally:
            self._pool.release(connection)

    async def _events(self, connection: Connection) -> AsyncGenerator[bytes]:
        """The payloads before `[DONE]`; ConnectionBroken if it does not come."""
        buffer = b""
        while part := await connection.part(self._idle_timeout_s):
            *events, buffer = (buffer + part).split(b"\n\n")
            for event in events:
                payload = event.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    with contextlib.suppress(ConnectionBroken):
                        await connection.part(self._idle_timeout_s)
                    return
                if payload:
                    yield payload
        raise ConnectionBroken("the stream ended without [DONE]", answered=True)

    async def complete(self, request: GenerateRequest) -> GenerateResult:
        """A whole answer, through the same stream."""
        chunks = [chunk async for chunk in self.generate(request)]
        gap = next((c.evidence_gap for c in chunks if c.evidence_gap), None)
        ranges = tuple(r for c in chunks for r in c.weight_versions)
        reason = chunks[-1].finish_reason
        assert reason is not None
        return GenerateResult(
            token_ids=tuple(i for c in chunks for i in c.token_ids),
            logprobs=tuple(p for c in chunks for p in c.logprobs),
            weight_versions=ranges if gap else merge_ranges(ranges),
            finish_reason=reason,
            evidence_gap=gap,
        )

    async def prompt_logprobs(
        self, token_ids: tuple[int, ...], request_id: str = "probe"
    ) -> PromptLogprobs:
        """Teacher-forced log-probs of a prompt, and the version that gave them."""
        request = GenerateRequest(request_id, token_ids, SamplingParams(1, temperature=0.0))
        answer = await self._call("POST", GENERATE, request.body(False, prompt_logprobs=True))
        try:
            chunk = parse_choice(answer["choices"][0], 0)
            if chunk.evidence_gap is not None or not chunk.weight_versions:
                raise ValueError(f"no version to go with the log-probs: {chunk}")
            logprobs = parse_prompt_logprobs(answer["prompt_logprobs"], token_ids)
            return PromptLogprobs(logprobs, chunk.weight_versions[0].version)
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise EngineDied(self.base_url, f"unreadable answer to a probe: {e!r}") from e

    async def pause(self, mode: str = "keep") -> None:
        """No token is sampled after this returns, until `resume`."""
        await self._call("POST", "/pause?" + urlencode({"mode": mode}), b"")

    async def resume(self) -> None:
        await self._call("POST", "/resume", b"")

    async def update(
        self, version: int, path: str, sha256: str | None = None, rollback: bool = False
    ) -> UpdateResult:
        body = {"version": version, "path": path, "sha256": sha256, "rollback": rollback}
        answer = await self._call("POST", "/update", orjson.dumps(body))
        try:
            return UpdateResult(answer["version"], answer["changed"], answer["seconds"])
        except (KeyError, TypeError) as e:
            raise EngineDied(self.base_url, f"unreadable answer to an update: {e!r}") from e

    async def versions(self) -> EngineVersions:
        answer = await self._call("GET", "/versions", None)
        try:
            return parse_versions(answer)
        except (KeyError, TypeError, AttributeError) as e:
            raise EngineDied(self.base_url, f"unreadable answer to versions: {e!r}") from e

    async def health(self) -> None:
        """Returns when the process answers, empty or not; else raises."""
        await self._call("GET", "/health", None)

    def _chunk(self, payload: bytes, received: int) -> GenerateChunk:
        try:
            event = orjson.loads(payload)
            if "error" in event:
                raise EngineDied(self.base_url, _message(event), received)
            return parse_choice(event["choices"][0], received)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
            raise EngineDied(self.base_url, f"unreadable event: {e!r}", received) from e

    async def _call(self, method: str, target: str, body: bytes | None) -> dict[str, Any]:
        connection = await self._exchange(method, target, body)
        try:
            answer: dict[str, Any] = orjson.loads(await connection.read(self._idle_timeout_s))
            return answer
        except (ConnectionBroken, orjson.JSONDecodeError) as e:
            raise EngineDied(self.base_url, f"{method} {target}: {e}") from e
        finally:
            self._pool.release(connection)

    async def _exchange(self, method: str, target: str, body: bytes | None) -> Connection:
        try:
            connection = await self._pool.exchange(method, target, body, self._idle_timeout_s)
        except OSError as e:
            raise EngineUnavailable(self.base_url, f"cannot connect: {e!r}") from e
        except ConnectionBroken as e:
            raise EngineDied(self.base_url, f"{method} {target}: {e}") from e
        if connection.status == 200:
            return connection
        try:
            raise await self._error(connection, f"{method} {target}")
        finally:
            self._pool.release(connection)

    async def _error(self, connection: Connection, what: str) -> EngineError:
        status = connection.status
        try:
            body = await connection.read(self._idle_timeout_s)
        except ConnectionBroken as e:
            return EngineDied(self.base_url, f"{what}: {status}, then {e}")
        message = f"{what}: {status} {_message_of(body)}"
        if status == 503:
            retry_after = _seconds(connection.headers.get("retry-after"))
            return EngineUnavailable(self.base_url, message, retry_after)
        if status == 409:
            return VersionConflict(self.base_url, message)
        if 400 <= status < 500:
            return EngineRefused(self.base_url, message, status)
        return EngineDied(self.base_url, message)


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else str(error)


def _message_of(body: bytes) -> str:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    return _message(parsed) if isinstance(parsed, dict) else body[:200].decode("utf-8", "replace")


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header)) if header is not None else 1.0
    except ValueError:
        return 1.0
