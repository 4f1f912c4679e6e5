"""``POST /chat/completions``: one call from its request to its row.

Invariant: the row is committed before the event that ends the answer, any whole tool call and all
after it go out. A call whose client left, or whose engine died, is stored as far as it came, and
its stream never ends as if it were whole.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, MutableMapping
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from archon.codec import Delta, ParsedAnswer
from archon.failpoints import failpoint
from archon.inference import (
    EngineDied,
    EngineRefused,
    EngineUnavailable,
    GenerateChunk,
)
from archon.records import InteractionStatus
from archon.storage.direct import Direct
from archon.storage.interactions import SessionGone, put_interaction
from gateway import metrics
from gateway.errors import ApiError, invalid, unavailable
from gateway.exchange import Exchange
from gateway.openai_chat import Chunks, completion, event
from gateway.prepare import aside, prepare
from gateway.service import Service

JSON = b"application/json"
SSE = b"text/event-stream; charset=utf-8"


class ChatCompletions:
    """The route, as an ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        request = Request(scope, receive)
        call = Call(self._service, send)
        try:
            with self._service.admit():
                exchange = await prepare(self._service, request)
                await self._unless_gone(call.run(exchange), receive)
        except ApiError as error:
            call.outcome = str(error.status)
            if call.begun:
                await call.break_off(error)
            else:
                await error.response()(scope, receive, send)
        except ClientDisconnect:
            call.outcome = "gone"
        finally:
            metrics.CALLS.labels(call.policy, call.outcome).inc()
            metrics.SECONDS.observe(time.monotonic() - started)

    async def _unless_gone(self, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Run the call until it is over, its client has left, or this process is to end."""

        async def left() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        running, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
        self._service.calls.add(running)
        gone = False
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            gone = leaving.done()
            if not running.done():
                running.cancel()
            await running
        except asyncio.CancelledError:
            if gone:
                raise ClientDisconnect from None
            running.cancel()
            raise unavailable("this gateway is going down: send the call again") from None
        finally:
            self._service.calls.discard(running)
            leaving.cancel()


class Call:
    """An exchange on its way to the client. ``begun``: the status line is out."""

    def __init__(self, service: Service, send: Send) -> None:
        self._service = service
        self._send = send
        self.begun = False
        self.policy = ""
        self.outcome = "failed"

    async def run(self, exchange: Exchange) -> None:
        self.policy = exchange.target.policy_id
        self._exchange = exchange
        self._parser = exchange.served.codec.stream(exchange.request.tools)
        self._chunks: Chunks | None = None
        try:
            reason, held = await self._generate()
        except asyncio.CancelledError:
            await self._keep(InteractionStatus.ABORTED, "abort")
            raise
        except EngineDied as error:
            await self._keep(InteractionStatus.FAILED, "abort")
            raise self._broken(f"the engine died: {error.message}") from error
        if reason == "abort":
            await self._keep(InteractionStatus.ABORTED, "abort")
            raise self._broken("the engine ended this answer early")
        held += self._parser.finish(reason)
        await self._commit(reason)
        await self._finish(held)
        self.outcome = "200"

    async def _generate(self) -> tuple[str, list[Delta]]:
        """The engine's finish reason, and the deltas that must wait for COMMIT."""
        exchange, reason = self._exchange, ""
        held: list[Delta] = []
        async with aclosing(self._sampled()) as chunks:
            async for chunk in chunks:
                exchange.add(chunk)
                deltas = self._parser.push(chunk.token_ids)
                reason = chunk.finish_reason or reason
                if not exchange.request.stream:
                    continue
                out = b""
                for delta in deltas:
                    if held or delta.tool_call is not None or chunk.finish_reason is not None:
                        held.append(delta)
                    else:
                        out += self._stream().delta(delta)
                await self._write(out)
        return reason, held

    async def _sampled(self) -> AsyncGenerator[GenerateChunk]:
        """The chunks of the first replica that begins; another is tried until then."""
        service, exchange = self._service, self._exchange
        policy = (exchange.target.tenant_id, exchange.target.policy_id)
        request = exchange.generate_request()
        deadline = time.monotonic() + service.settings.gateway.hold_seconds
        while True:
            member = await service.pool.acquire(policy, exchange.session_id, deadline)
            exchange.dispatched_to(member)
            try:
                async with aclosing(member.client.generate(request)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except EngineUnavailable as error:
                service.pool.mark_dead(member, error.message)
                if time.monotonic() > deadline:
                    raise unavailable(error.message, error.retry_after) from error
            except EngineRefused as error:
                if error.code in (401, 403, 404):
                    raise ApiError(500, f"replica {member.url}: {error.message}") from error
                raise invalid(f"the engine refuses this request: {error.message}") from error
            except EngineDied as error:
                service.pool.mark_dead(member, error.message)
                if exchange.output_ids or time.monotonic() > deadline:
                    raise

    async def _commit(self, reason: str) -> None:
        exchange = self._exchange
        failpoint("gateway.before_row")
        await self._store(InteractionStatus.COMPLETE, reason, self._parser.answer)
        failpoint("gateway.after_row")
        self._service.history.remember(
            exchange.interaction_id, exchange.prompt, exchange.output_bytes
        )
        metrics.TOKENS.labels(self.policy, "prompt").inc(len(exchange.prompt.ids))
        metrics.TOKENS.labels(self.policy, "sampled").inc(len(exchange.output_ids))
        if exchange.gaps:
            metrics.GAPS.labels(self.policy).inc()

    async def _store(self, status: InteractionStatus, reason: str, answer: ParsedAnswer) -> None:
        started = time.monotonic()
        exchange, now = self._exchange, self._service.clock()
        winner = exchange.winner if status == InteractionStatus.COMPLETE else None

        async def put(c: Direct) -> None:
            row = await aside(exchange.large, exchange.row, status, reason, answer, now)
            await put_interaction(c, row, winner)

        try:
            await self._service.rows.statement(put)
        except SessionGone as error:
            raise ApiError(404, str(error), code="session_not_found") from error
        metrics.COMMIT_SECONDS.observe(time.monotonic() - started)

    async def _finish(self, held: list[Delta]) -> None:
        exchange = self._exchange
        if not exchange.request.stream:
            body = completion(exchange, self._parser.answer)
            await self._start(JSON, len(body))
            await self._write(body, more=False)
            return
        stream = self._stream()
        out = b"".join(stream.delta(delta) for delta in held)
        await self._write(out + stream.last(self._parser.answer.finish_reason), more=False)

    async def _keep(self, status: InteractionStatus, reason: str) -> None:
        """Store what there is of a call that did not come to its end."""
        self.outcome = status.value
        self._parser.finish("abort")
        await self._store(status, reason, self._parser.answer)

    def _broken(self, message: str) -> ApiError:
        return unavailable(f"call {self._exchange.interaction_id}: {message}; send it again")

    async def break_off(self, error: ApiError) -> None:
        """The error event, and no proper end: the server cuts the connection after it."""
        await self._write(event(error.body()))

    def _stream(self) -> Chunks:
        if self._chunks is None:
            self._chunks = Chunks(self._exchange)
            self._pending = self._chunks.first()
        return self._chunks

    async def _write(self, data: bytes, more: bool = True) -> None:
        if self._chunks is not None and not self.begun:
            await self._start(SSE)
            data = self._pending + data
        if data or not more:
            body: MutableMapping[str, Any] = {"type": "http.response.body", "body": data}
            await self._send({**body, "more_body": more})

    async def _start(self, content_type: bytes, length: int | None = None) -> None:
        self.begun = True
        exchange = self._exchange
        headers = [
            (b"content-type", content_type),
            (b"x-request-id", exchange.interaction_id.encode()),
            (b"x-archon-session", exchange.session_id.encode()),
        ]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        else:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
