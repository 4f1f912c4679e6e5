"""Everything about a chat call that comes before the engine: who, where, what, and the ids.

Invariant: a request that cannot be served is refused here, before anything is sampled or stored;
only the slot's next session may have been opened.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from starlette.requests import Request

from archon.codec import CodecError, prefix_digests
from archon.records import INTERACTION
from archon.storage.interactions import Standing, look
from archon.storage.sessions import open_next
from gateway.auth import Caller, unknown_key
from gateway.catalog import Served
from gateway.errors import ApiError, invalid, unavailable
from gateway.exchange import Exchange
from gateway.history import render
from gateway.request import ChatRequest, read_chat
from gateway.rows import applied
from gateway.service import Service
from gateway.slots import Target

T = TypeVar("T")
MAX_BODY = 64 << 20
LARGE_BODY = 64 << 10


async def prepare(service: Service, request: Request) -> Exchange:
    """Everything before the engine: who, where, what, and the prompt's ids."""
    caller = await service.keyring.caller(request.headers)
    body = await read_body(request)
    chat = read_chat(body)
    session = request.path_params.get("session")
    target = await service.slots.target(caller, session, request.headers, chat.model)
    served = await service.catalog.get(target.tenant_id, target.policy_id)
    large = len(body) > LARGE_BODY
    try:
        digests = await aside(large, prefix_digests, chat.messages, chat.tools)
        standing = await stand(service, caller, target, served, chat, digests)
        assert standing.session_id is not None
        kept = digests.index(standing.parent_digest) + 1 if standing.parent_digest else 0
        parent = await service.history.parent_of(standing, served)
        prompt = await aside(large, render, chat, served, standing.parent_id, parent, kept)
    except CodecError as error:
        raise invalid(str(error), error.param) from error
    contested = standing.contested and standing.parent_id is not None
    return Exchange(
        interaction_id=service.new_id(INTERACTION),
        session_id=standing.session_id,
        target=target,
        served=served,
        request=chat,
        request_digest=digests[-1],
        prompt=prompt,
        previous=standing.previous,
        winner=(standing.parent_id or "", standing.parent_request or "") if contested else None,
        max_tokens=_room(served, chat, len(prompt.ids)),
        started_at=service.clock(),
        large=large,
    )


async def aside(large: bool, work: Callable[..., T], *arguments: object) -> T:
    """Work of some milliseconds for a large request is done in a thread, for the others' sake."""
    return await asyncio.to_thread(work, *arguments) if large else work(*arguments)


async def read_body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise ApiError(413, f"the body has more than {MAX_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


async def stand(
    service: Service,
    caller: Caller,
    target: Target,
    served: Served,
    chat: ChatRequest,
    digests: list[str],
) -> Standing:
    """The slot's open session, opened here if need be, and what the request continues in it."""
    ends = [
        digest
        for digest, message in zip(digests[:-1], chat.messages, strict=False)
        if message.get("role") == "assistant"
    ]
    for _ in range(3):
        now = service.clock()
        where = (caller.key_hash, target.tenant_id, target.slot, ends[::-1], digests[-1], now)
        standing = await service.rows.statement(applied(look, *where))
        if not (standing.key_valid or caller.operator):
            service.keyring.forget(caller.key_hash)
            raise unknown_key()
        due = standing.close_after is not None and standing.close_after <= now
        if standing.session_id is not None and not due:
            return standing
        deadline = now + timedelta(seconds=served.settings.group_timeout)
        slot = (target.tenant_id, target.policy_id, target.slot, now, deadline, service.new_id)
        await service.rows.transaction(applied(open_next, *slot))
    raise unavailable(f"the sessions of slot {target.slot[:12]} change too fast: try again")


def _room(served: Served, chat: ChatRequest, prompt: int) -> int:
    """How many tokens may be sampled; a 400 where there is no room for one."""
    context = served.settings.max_model_len
    if served.codec.max_len_hint is not None:
        context = min(context, served.codec.max_len_hint)
    if prompt >= context:
        raise invalid(
            f"This model's maximum context length is {context} tokens. However, your messages "
            f"resulted in {prompt} tokens. Please reduce the length of the messages.",
            "messages",
            "context_length_exceeded",
        )
    wanted = served.settings.max_tokens
    if chat.max_tokens is not None:
        wanted = min(wanted, chat.max_tokens)
    return min(wanted, context - prompt)
