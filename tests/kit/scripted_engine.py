"""A double of an inference engine: docs/protocol.md with scripted answers and no torch.

In process, with an event loop of its own thread, so that synchronous tests can use it too:

    with ScriptedEngine([Answer([11, 2])], version=1) as engine:
        client = EngineClient(engine.url)

Standalone: `python -m tests.kit.scripted_engine --port 9000 --script answers.json --version 1`.
Invariant: it sends exactly what the script says, right or wrong, and keeps all that it was sent.
"""

import argparse
import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httptools
import orjson


@dataclass
class Answer:
    """One scripted answer. Lists may be too short or missing: that is how gaps are tested."""

    token_ids: list[int]
    logprobs: list[float] | None = None
    """None: −0.5 each; an empty list: the field is left out."""
    versions: list[int] | None = None
    """One for each token. None: the version in force when the token is sent."""
    delays: list[float] = field(default_factory=list)
    """Seconds before each token; the last one counts for those that follow."""
    die_after: int | None = None
    """Cut the connection after so many tokens; −1 cuts it before the status line."""
    finish_reason: str | None = None
    """None: `stop`, or `length` where `max_tokens` is reached."""
    status: int = 200
    message: str = "scripted refusal"
    retry_after: int = 1
    chunk: int = 1
    """Tokens in a chunk of a stream."""
    error_after: int | None = None
    """Send an error event after so many tokens, and end without [DONE]."""
    done: bool = True
    """False: end the stream properly but without [DONE]."""


@dataclass
class Recorded:
    """One request as it came, and what became of it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    at: float
    sent_tokens: int = 0
    finished: bool = False
    cancelled: bool = False


Default = Answer | Callable[[dict[str, Any]], Answer]
Probe = Callable[[list[int], int], list[float]]


class Refusal(Exception):
    def __init__(self, status: int, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class ScriptedEngine:
    """`answers` are used up in order, then `default` for ever, then 500."""

    def __init__(
        self,
        answers: Iterable[Answer] = (),
        *,
        default: Default | None = None,
        version: int | None = None,
        token: str | None = None,
        port: int = 0,
        update_seconds: float = 0.0,
        probe: Probe | None = None,
        max_model_len: int = 64,
        vocab_size: int = 32,
    ) -> None:
        self.answers = deque(answers)
        self.default = default
        self.version = version
        self.sha256: str | None = None
        self.token = token
        self.port = port
        self.update_seconds = update_seconds
        self.update_refusals: deque[tuple[int, str]] = deque()
        """(status, message) for the next updates."""
        self.probe: Probe = probe or (lambda ids, version: [-1.0] * (len(ids) - 1))
        self.paused = False
        self.running = 0
        self.aborts = 0
        self.requests: list[Recorded] = []
        self.instance = f"{time.monotonic_ns():x}"
        self.model = {
            "architecture": "Scripted",
            "max_model_len": max_model_len,
            "vocab_size": vocab_size,
            "dtype": "float32",
        }
        self._connections: set[_Connection] = set()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def generated(self) -> list[Recorded]:
        return [r for r in self.requests if r.path.endswith("/generate")]

    @property
    def updates(self) -> list[dict[str, Any]]:
        return [r.body for r in self.requests if r.path == "/update"]

    def push(self, *answers: Answer) -> None:
        self.answers.extend(answers)

    def __enter__(self) -> "ScriptedEngine":
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.serve(started.set)), daemon=True
        )
        self._thread.start()
        if not started.wait(10):
            raise RuntimeError("the scripted engine did not start in 10 s")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End as a killed process does: listening socket and connections are gone at once."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._thread = None

    async def serve(self, started: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await self._loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        started()
        await self._stop.wait()
        server.close()
        for connection in list(self._connections):
            connection.cut()

    async def handle(self, connection: "_Connection", request: Recorded) -> None:
        try:
            if request.path == "/health":
                connection.json({})
                return
            if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
                raise Refusal(401, "wrong or missing token")
            if request.path == "/inference/v1/generate":
                await self._generate(connection, request)
            else:
                connection.json(await self._control(request))
        except Refusal as e:
            connection.error(e.status, str(e), e.retry_after)
        request.finished = True

    async def _control(self, request: Recorded) -> dict[str, Any]:
        match (request.method, request.path):
            case ("POST", "/pause"):
                self.paused = True
                self.aborts += request.query.get("mode") == "abort"
                return {"paused": True}
            case ("POST", "/resume"):
                self.paused = False
                return {"paused": False}
            case ("POST", "/update"):
                return await self._update(request.body)
            case ("GET", "/versions"):
                return {
                    "engine": "scripted",
                    "build": "scripted-1",
                    "instance": self.instance,
                    "version": self.version,
                    "sha256": self.sha256,
                    "paused": self.paused,
                    "running": self.running,
                    "queued": 0,
                    "model": None if self.version is None else self.model,
                }
        raise Refusal(404, f"no route {request.method} {request.path}")

    async def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        await asyncio.sleep(self.update_seconds)
        if self.update_refusals:
            raise Refusal(*self.update_refusals.popleft())
        version, sha256 = body["version"], body.get("sha256")
        changed = version != self.version
        if not changed and sha256 not in (None, self.sha256):
            raise Refusal(409, f"version {version} is here with another digest")
        if self.version is not None and version < self.version and not body.get("rollback"):
            raise Refusal(409, f"version {version} is older than {self.version}")
        if changed:
            self.version, self.sha256 = version, sha256
        return {"version": version, "changed": changed, "seconds": time.monotonic() - started}

    def _next(self, body: dict[str, Any]) -> Answer:
        if self.answers:
            return self.answers.popleft()
        if self.default is None:
            raise Refusal(500, "the script has no answer left")
        return self.default if isinstance(self.default, Answer) else self.default(body)

    async def _generate(self, connection: "_Connection", request: Recorded) -> None:
        body = request.body
        if self.version is None:
            raise Refusal(503, "no weights yet")
        if body["sampling_params"].get("prompt_logprobs") is not None:
            connection.json(self._probed(body))
            return
        answer = self._next(body)
        if answer.status != 200:
            raise Refusal(answer.status, answer.message, answer.retry_after)
        if answer.die_after == -1:
            connection.cut()
            return
        self.running += 1
        try:
            await self._play(connection, request, answer)
        finally:
            self.running -= 1

    def _probed(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.version is not None
        ids = body["token_ids"]
        values = self.probe(ids, self.version)
        entries = [{str(i): {"logprob": p}} for i, p in zip(ids[1:], values, strict=True)]
        choice = _choice(Answer([0]), [self.version], 0, 1, "length")
        return {
            "request_id": body["request_id"],
            "choices": [choice],
            "prompt_logprobs": [None, *entries],
        }

    async def _play(self, connection: "_Connection", request: Recorded, answer: Answer) -> None:
        body, ids, stream = request.body, answer.token_ids, request.body["stream"]
        limit = body["sampling_params"].get("max_tokens")
        reason = answer.finish_reason or ("length" if len(ids) == limit else "stop")
        cut = answer.die_after if answer.error_after is None else answer.error_after
        versions: list[int] = []
        begin = sent = 0
        if stream:
            connection.start_stream()
        aborts = self.aborts
        for i in range(len(ids) if cut is None else min(cut, len(ids))):
            await self._before_token(answer, i, aborts)
            if self.aborts != aborts:
                reason = "abort"
                break
            version = self._version_of(answer, i)
            versions.extend([] if version is None else [version])
            sent = request.sent_tokens = i + 1
            if stream and (sent - begin == answer.chunk or sent == cut) and sent < len(ids):
                connection.event(_event(body, _choice(answer, versions, begin, sent, None)))
                begin = sent
        if answer.die_after is not None:
            connection.cut()
        elif answer.error_after is not None:
            connection.event({"error": {"message": answer.message, "type": "engine", "code": 500}})
            connection.end_stream()
        elif stream:
            connection.event(_event(body, _choice(answer, versions, begin, sent, reason)))
            connection.end_stream(b"data: [DONE]\n\n" if answer.done else b"")
        else:
            choice = _choice(answer, versions, 0, sent, reason)
            connection.json(_event(body, choice) | {"prompt_logprobs": None})

    async def _before_token(self, answer: Answer, i: int, aborts: int) -> None:
        if answer.delays:
            await asyncio.sleep(answer.delays[min(i, len(answer.delays) - 1)])
        while self.paused and self.aborts == aborts:
            await asyncio.sleep(0.001)

    def _version_of(self, answer: Answer, i: int) -> int | None:
        if answer.versions is None:
            return self.version
        return answer.versions[i] if i < len(answer.versions) else None


def _event(body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": body["request_id"], "choices": [choice]}


def _choice(
    answer: Answer, versions: list[int], begin: int, end: int, reason: str | None
) -> dict[str, Any]:
    ids = answer.token_ids
    logprobs = [-0.5] * len(ids) if answer.logprobs is None else answer.logprobs
    content = [
        {"token": f"token_id:{i}", "logprob": p}
        for i, p in zip(ids[begin:end], logprobs[begin:end], strict=False)
    ]
    ranges: list[dict[str, Any]] = []
    for position, version in enumerate(versions[begin:end], begin):
        if ranges and ranges[-1]["version"] == str(version):
            ranges[-1]["end"] = position + 1
        else:
            ranges.append({"version": str(version), "start": position, "end": position + 1})
    return {
        "index": 0,
        "token_ids": ids[begin:end],
        "logprobs": None if answer.logprobs == [] else {"content": content},
        "finish_reason": reason,
        "weight_versions": ranges,
    }


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; callbacks named on_* belong to the parser."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.parser = httptools.HttpRequestParser(self)
        self.target = b""
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.task: asyncio.Task[None] | None = None
        self.request: Recorded | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.engine._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine._connections.discard(self)
        if self.task is not None and self.request is not None and not self.task.done():
            self.request.cancelled = True
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.target = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        url = urlsplit(self.target.decode())
        self.request = Recorded(
            method=self.parser.get_method().decode(),
            path=url.path,
            query={k: v[0] for k, v in parse_qs(url.query).items()},
            headers=self.headers,
            body=orjson.loads(self.body) if self.body else None,
            at=time.monotonic(),
        )
        self.headers, self.body = {}, bytearray()
        self.engine.requests.append(self.request)
        self.task = asyncio.get_running_loop().create_task(self.engine.handle(self, self.request))

    def cut(self) -> None:
        self.transport.abort()

    def json(self, body: object, status: int = 200, extra: str = "") -> None:
        content = orjson.dumps(body)
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}"
        self.transport.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)

    def error(self, status: int, message: str, retry_after: int) -> None:
        extra = f"retry-after: {retry_after}\r\n" if status == 503 else ""
        error = {"message": message, "type": "scripted", "code": status}
        self.json({"error": error}, status, extra)

    def start_stream(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    def event(self, body: object) -> None:
        self._part(b"data: " + orjson.dumps(body) + b"\n\n")

    def end_stream(self, last: bytes = b"") -> None:
        if last:
            self._part(last)
        self.transport.write(b"0\r\n\r\n")

    def _part(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def main() -> None:
    parser = argparse.ArgumentParser(description="A scripted inference engine.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script", type=Path, help="JSON: a list of answers; the last repeats")
    parser.add_argument("--version", type=int, help="start with weights of this version")
    parser.add_argument("--control-token-file", type=Path)
    options = parser.parse_args()
    script = json.loads(options.script.read_text()) if options.script else [{"token_ids": [0]}]
    answers = [Answer(**fields) for fields in script]
    token = options.control_token_file.read_text().strip() if options.control_token_file else None
    engine = ScriptedEngine(
        answers[:-1], default=answers[-1], version=options.version, token=token, port=options.port
    )
    asyncio.run(engine.serve(lambda: print(f"listening on {engine.url}", flush=True)))


if __name__ == "__main__":
    main()
