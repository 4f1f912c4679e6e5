"""The two routes of a gateway that a rollout calls, on the real tables, without the gateway."""

import asyncio
import json
from collections import deque
from datetime import timedelta
from typing import Any

from archon.records import CloseReason, random_id, system_clock
from archon.storage import Database
from archon.storage.sessions import Plan, close_session, start_sessions
from tests.rollout.history import POLICY, TENANT


class SmallGateway:
    """``refusals`` are (status, headers) for the next calls."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.refusals: deque[tuple[int, str]] = deque()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []
        self.url = ""

    async def __aenter__(self) -> "SmallGateway":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            method, path, _ = head.decode().split(" ", 2)
            length = 0
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.decode().partition(":")
                length = int(value) if name.lower() == "content-length" else length
            body = json.loads(await reader.readexactly(length) or b"{}")
            status, headers, answer = 200, "", {}
            if self.refusals:
                status, headers = self.refusals.popleft()
            else:
                self.calls.append((path, body))
                answer = await self._answer(path, body)
            data = json.dumps(answer).encode()
            writer.write(
                f"HTTP/1.1 {status} X\r\n{headers}content-length: {len(data)}\r\n\r\n".encode()
                + data
            )
            await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.startswith("/rl/sessions/"):
            return {
                "rewards": [
                    {"seq": 2, "component": "", "source": "", "value": 0.5, "interaction_id": None},
                    {"seq": 1, "component": "", "source": "", "value": 9.0, "interaction_id": None},
                    {"seq": 3, "component": "b", "source": "", "value": 1, "interaction_id": None},
                    {"seq": 4, "component": "", "source": "", "value": 8, "interaction_id": "int"},
                ]
            }
        async with self._db.begin() as c:
            if path == "/rl/end_session":
                now = system_clock()
                await close_session(c, TENANT, body["session_id"], CloseReason.END, now)
                return {}
            plan = Plan(
                TENANT,
                POLICY,
                task_id=body["task_id"],
                group_id=body.get("group_id"),
                labels=body["labels"],
                trainable=body["trainable"],
                deadline=system_clock() + timedelta(hours=1),
            )
            (started,) = await start_sessions(c, plan, system_clock(), random_id)
        assert started.secret is not None
        self.keys.append(started.secret)
        return {"session_id": started.session_id, "api_key": started.secret}
