"""The HTTP routes of docs/protocol.md, as a bare ASGI application.

Invariant: an answer ends with a finish reason, with an error event, or not at all; and whatever
makes a client go away frees its slot.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson

from engine.serving import weights as weights_module
from engine.serving import wire
from engine.serving.scheduler import Scheduler
from engine.serving.wire import Output, Refusal

log = logging.getLogger("archon.engine")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream")
RETRY_AFTER_S = b"1"
MAX_BODY_BYTES = 16 << 20


class Mailbox:
    """Outputs of one request, on the event loop's thread. None: the client left."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._left = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self._wake()

    def leave(self, _: object = None) -> None:
        self._left = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Output | None:
        """All that came since the last call, as one."""
        while not self._outputs and not self._left:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._left:
            return None
        outputs, self._outputs = self._outputs, []
        return wire.join(outputs)


class App:
    def __init__(self, scheduler: Scheduler, token: str | None, instance: str, build: str) -> None:
        self.scheduler = scheduler
        self.instance = instance
        self.build = build
        self._authorization = f"Bearer {token}".encode() if token else None
        self._updating = asyncio.Lock()
        self._controls: dict[tuple[str, str], Callable[[Scope, bytes], Awaitable[Any]]] = {
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("POST", "/update"): self._update,
            ("GET", "/versions"): self._versions,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        try:
            if path == "/health":
                await _answer(send, 200, {})
                return
            self._authorize(scope)
            if (method, path) == ("POST", "/inference/v1/generate"):
                await self._generate(receive, send)
                return
            control = self._controls.get((method, path))
            if control is None:
                raise Refusal(404, f"no route {method} {path}")
            await _answer(send, 200, await control(scope, await _body(receive)))
        except Refusal as e:
            await _answer(send, e.code, wire.error_body(e.code, str(e)))

    def _authorize(self, scope: Scope) -> None:
        if self._authorization is None:
            return
        for name, value in scope["headers"]:
            if name == b"authorization" and hmac.compare_digest(value, self._authorization):
                return
        raise Refusal(401, "wrong or missing control token")

    async def _generate(self, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        runner = self.scheduler.runner
        if runner.weights is None:
            raise Refusal(503, "no weights yet: this engine waits for its first update")
        vocab_size = runner.weights.decoder.config.vocab_size
        request = wire.parse_generate(body, vocab_size, runner.weights.positions)
        mailbox = Mailbox()
        row = self.scheduler.submit(request, mailbox.put)
        watch = asyncio.ensure_future(receive())
        watch.add_done_callback(mailbox.leave)
        ended = False
        try:
            if request.stream:
                ended = await _stream(send, mailbox, request.request_id)
            elif (output := await mailbox.get()) is not None:
                ended = True
                if output.error is not None:
                    raise Refusal(500, output.error)
                await _send(send, 200, JSON, wire.whole(request, output))
        finally:
            watch.remove_done_callback(mailbox.leave)
            watch.cancel()
            if not ended:
                self.scheduler.abandon(row)

    async def _pause(self, scope: Scope, body: bytes) -> dict[str, Any]:
        query = parse_qs(scope["query_string"].decode())
        mode = query.get("mode", ["keep"])[-1]
        if mode not in ("keep", "abort"):
            raise Refusal(400, f"mode must be keep or abort, not {mode!r}")
        await self.scheduler.pause(abort_running=mode == "abort")
        return {"paused": True}

    async def _resume(self, scope: Scope, body: bytes) -> dict[str, Any]:
        await self.scheduler.resume()
        return {"paused": False}

    async def _update(self, scope: Scope, body: bytes) -> dict[str, Any]:
        raw = wire.parse_json(body)
        version, path, sha256 = raw.get("version"), raw.get("path"), raw.get("sha256")
        if type(version) is not int or version < 0:
            raise Refusal(400, f"version must be an integer of at least 0, not {version!r}")
        if not isinstance(path, str) or not isinstance(sha256, str | None):
            raise Refusal(400, "path must be a string, sha256 a string or null")
        async with self._updating:
            started = time.perf_counter()
            changed = await self._change(version, Path(path), sha256, bool(raw.get("rollback")))
            seconds = time.perf_counter() - started
        log.info("version %d, changed=%s, %.3f s", version, changed, seconds)
        return {"version": version, "changed": changed, "seconds": round(seconds, 6)}

    async def _change(self, version: int, folder: Path, sha256: str | None, rollback: bool) -> bool:
        runner = self.scheduler.runner
        serving = runner.weights
        if serving is not None and version == serving.version:
            found = sha256 or await asyncio.to_thread(weights_module.digest, folder)
            if found == serving.sha256:
                return False
            raise Refusal(
                409, f"version {version} is served with digest {serving.sha256}, not {found}"
            )
        if serving is not None and version < serving.version and not rollback:
            raise Refusal(
                409, f"version {serving.version} is served; {version} is older: set rollback"
            )
        loaded = await asyncio.to_thread(
            weights_module.load,
            folder,
            version,
            sha256,
            runner.dtype,
            runner.max_model_len,
            serving.decoder.config if serving else None,
        )
        await self.scheduler.swap(loaded)
        return True

    async def _versions(self, scope: Scope, body: bytes) -> dict[str, Any]:
        runner = self.scheduler.runner
        weights, model = runner.weights, None
        if weights is not None:
            model = {
                "architecture": weights.decoder.config.architecture,
                "max_model_len": weights.positions,
                "vocab_size": weights.decoder.config.vocab_size,
                "dtype": str(runner.dtype).removeprefix("torch."),
            }
        return {
            "engine": "embedded",
            "build": self.build,
            "instance": self.instance,
            "version": weights.version if weights else None,
            "sha256": weights.sha256 if weights else None,
            "paused": self.scheduler.paused,
            "running": self.scheduler.running,
            "queued": self.scheduler.queued,
            "model": model,
        }


async def _stream(send: Send, mailbox: Mailbox, request_id: str) -> bool:
    """Whether the last output was sent."""
    started = False
    while (output := await mailbox.get()) is not None:
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": [EVENTS]})
            started = True
        part = wire.event(request_id, output)
        await send({"type": "http.response.body", "body": part, "more_body": not output.last})
        if output.last:
            return True
    return False


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the client left before its request was whole")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise Refusal(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    await _send(send, status, JSON, orjson.dumps(body))


async def _send(send: Send, status: int, kind: tuple[bytes, bytes], body: bytes) -> None:
    headers = [kind, (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", RETRY_AFTER_S))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
