"""The gateway as an ASGI application: its routes, its errors, its life.

Invariant: every answer, an unknown route's too, has the form that OpenAI's clients expect.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from archon.records import KeyScope
from gateway import metrics
from gateway.chat import ChatCompletions
from gateway.errors import ApiError, answer_api_error
from gateway.keys import KeyRoutes
from gateway.rl import RlRoutes, answer
from gateway.secrets import is_public
from gateway.service import Service

log = logging.getLogger("archon.gateway")
VERSIONS = ("", "/v1", "/v1/v1")


def create_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="Archon", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_life(service)
    )
    app.state.service = service
    chat, models = ChatCompletions(service), _models(service)
    for prefix in (*VERSIONS, *(f"/s/{{session}}{version}" for version in VERSIONS)):
        app.router.routes += [
            Route(f"{prefix}/chat/completions", chat, methods=["POST"]),
            Route(f"{prefix}/models", models, methods=["GET"]),
            Route(f"{prefix}/models/{{model}}", models, methods=["GET"]),
        ]
    rl, keys = RlRoutes(service), KeyRoutes(service)
    for prefix in ("", "/v1"):
        app.router.routes += [
            Route(f"{prefix}/rl/start_session", rl.start_session, methods=["POST"]),
            Route(f"{prefix}/rl/set_reward", rl.set_reward, methods=["POST"]),
            Route(f"{prefix}/rl/end_session", rl.end_session, methods=["POST"]),
            Route(f"{prefix}/rl/sessions/{{session_id}}", rl.session, methods=["GET"]),
            Route(f"{prefix}/rl/keys", keys.create, methods=["POST"]),
            Route(f"{prefix}/rl/keys", keys.list, methods=["GET"]),
            Route(f"{prefix}/rl/keys/{{key_id}}", keys.revoke, methods=["DELETE"]),
        ]
    app.router.routes += [
        Route("/health", _health, methods=["GET"]),
        Route("/metrics", _metrics(service), methods=["GET"]),
    ]
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer_unforeseen)
    return app


def _life(service: Service):  # type: ignore[no-untyped-def]  # noqa: ANN202
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(service.pool.run())
        following.add_done_callback(_end_if_it_failed)
        try:
            yield
        finally:
            following.cancel()
            await service.pool.close()
            await service.rows.close()

    return life


def _end_if_it_failed(task: asyncio.Task[None]) -> None:
    """A gateway that no longer follows its replicas must not go on as if it did."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the replica pool failed; this process ends", exc_info=error)
        signal.raise_signal(signal.SIGTERM)


def _models(service: Service):  # type: ignore[no-untyped-def]  # noqa: ANN202
    async def models(request: Request) -> Response:
        caller = await service.keyring.caller(request.headers)
        session = request.path_params.get("session")
        if session is not None:
            names = [(await service.slots.of_session(caller, session)).policy_id]
        else:
            names = await service.slots.policies(caller, caller.tenant_id)
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "archon"} for name in names
        ]
        asked = request.path_params.get("model")
        if asked is None:
            return answer({"object": "list", "data": listed})
        for model in listed:
            if model["id"] == asked:
                return answer(model)
        raise ApiError(404, f"there is no model {asked!r} here", code="model_not_found")

    return models


async def _health(_: Request) -> Response:
    return answer({"status": "ok"})


def _metrics(service: Service):  # type: ignore[no-untyped-def]  # noqa: ANN202
    async def show(request: Request) -> Response:
        if is_public(service.settings.gateway.host):
            (await service.keyring.caller(request.headers)).require(KeyScope.ADMIN)
        metrics.REPLICAS.set(sum(m.alive for m in service.pool.members.values()))
        return Response(generate_latest(), headers={"content-type": CONTENT_TYPE_LATEST})

    return show


async def _answer_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such route here", 405: "this route takes another method"}
    message = messages.get(error.status_code, str(error.detail))
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _answer_unforeseen(request: Request, error: Exception) -> Response:
    message = f"{type(error).__name__} in {request.method} {request.url.path}: see the log"
    return Response(orjson.dumps(ApiError(500, message).body()), 500, media_type="application/json")
