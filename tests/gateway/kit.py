"""A gateway in this process, on a real port, with a real database and scripted engines."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
import uvicorn
from openai import AsyncOpenAI

from archon.codec import Codec
from archon.records import Interaction, Policy, PolicySettings, Replica, Tenant, random_id
from archon.settings import Settings
from archon.storage import Database, tables
from archon.storage.rows import fetch_all, insert_record
from gateway.app import create_app
from gateway.service import Service, build
from tests.gateway.model import write_model
from tests.kit.scripted_engine import Answer, ScriptedEngine

ADMIN = "sk-admin-" + "t" * 40
ENGINE_TOKEN = "engine-token"


@dataclass
class Clock:
    """A clock that a test sets."""

    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class World:
    """Everything that a test of the gateway touches."""

    url: str
    database: Database
    codec: Codec
    model: Path
    service: Service
    http: httpx.AsyncClient
    tenant: str = "default"

    def openai(self, key: str, base: str = "/v1", **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=self.url + base, api_key=key, max_retries=0, timeout=20, **options
        )

    def ids(self, text: str, end: bool = True) -> list[int]:
        """What an engine samples to say ``text``."""
        return self.codec.encode(text + ("<|im_end|>" if end else ""))

    def say(self, text: str, **options: Any) -> Answer:
        return Answer(self.ids(text), **options)

    async def policy(
        self, policy_id: str = "default", tenant_id: str | None = None, **settings: Any
    ) -> PolicySettings:
        tenant_id = tenant_id or self.tenant
        made = PolicySettings(model=str(self.model), **settings)
        now = datetime.now(UTC)
        async with self.database.begin() as c:
            await c.execute(
                insert_record(tables.tenant, Tenant(tenant_id, now)).on_conflict_do_nothing()
            )
            row = Policy(tenant_id, policy_id, json.loads(json.dumps(asdict(made))), now)
            await c.execute(insert_record(tables.policy, row))
        return made

    async def replica(
        self, engine: ScriptedEngine, policy_id: str = "default", tenant_id: str | None = None
    ) -> str:
        replica_id, now = random_id("rep"), datetime.now(UTC)
        row = Replica(
            replica_id, tenant_id or self.tenant, policy_id, engine.url, "scripted", now,
            engine.version, engine.instance,
        )  # fmt: skip
        async with self.database.begin() as c:
            await c.execute(insert_record(tables.replica, row))
        await self.service.pool.refresh()
        return replica_id

    async def post(
        self, path: str, key: str, body: object = None, **options: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | options.pop("headers", {})
        return await self.http.post(path, json=body or {}, headers=headers, **options)

    async def get(self, path: str, key: str) -> httpx.Response:
        return await self.http.get(path, headers={"authorization": f"Bearer {key}"})

    async def start_anyway(self, key: str = ADMIN, **body: Any) -> httpx.Response:
        if key == ADMIN:
            body = {"tenant": self.tenant, **body}
        return await self.post("/rl/start_session", key, body)

    async def start(self, key: str = ADMIN, **body: Any) -> dict[str, Any]:
        response = await self.start_anyway(key, **body)
        assert response.status_code == 200, response.text
        started: dict[str, Any] = response.json()
        return started

    async def interactions(self, session_id: str | None = None) -> list[Interaction]:
        query = sa.select(tables.interaction).order_by(
            tables.interaction.c.session_id, tables.interaction.c.seq
        )
        if session_id is not None:
            query = query.where(tables.interaction.c.session_id == session_id)
        else:
            query = query.where(tables.interaction.c.tenant_id == self.tenant)
        async with self.database.connect() as c:
            return await fetch_all(c, Interaction, query)

    async def rows(self, table: sa.Table, **where: Any) -> list[dict[str, Any]]:
        query = sa.select(table)
        if "tenant_id" in table.c:
            where = {"tenant_id": self.tenant, **where}
        for name, value in where.items():
            query = query.where(table.c[name] == value)
        async with self.database.connect() as c:
            return [dict(row._mapping) for row in await c.execute(query)]

    async def eventually_rows(
        self, table: sa.Table, count: int, **where: Any
    ) -> list[dict[str, Any]]:
        for _ in range(100):
            rows = await self.rows(table, **where)
            if len(rows) >= count:
                break
            await asyncio.sleep(0.03)
        return rows


def secrets_of(data_dir: Path) -> None:
    secrets = data_dir / "secrets"
    secrets.mkdir(parents=True, exist_ok=True)
    (secrets / "admin.key").write_text(ADMIN + "\n")
    (secrets / "engine.token").write_text(ENGINE_TOKEN + "\n")


@contextlib.asynccontextmanager
async def running(
    database_url: str, folder: Path, gateway: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[World]:
    data_dir = folder / "data"
    secrets_of(data_dir)
    settings = Settings(
        data_dir=data_dir,
        postgres={"url": database_url},
        gateway={"port": 0, **(gateway or {})},
    )
    service = build(settings, **options)
    config = uvicorn.Config(
        create_app(service), port=0, log_config=None, access_log=False, lifespan="on",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        if serving.done():
            await serving
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    model = write_model(folder / "model")
    database = Database(database_url)
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        try:
            yield World(url, database, Codec.load(model), model, service, http)
        finally:
            server.should_exit = True
            await serving
            await database.close()
