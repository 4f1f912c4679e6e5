"""The activity that plays the members of a group, on the machine where the agents run.

Invariant: a session's key goes from the gateway to the agent and nowhere else. Each run of a member
has a session of its own, named by labels, and leaves one line in the record of the rollout.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.beats import heartbeats
from archon.cli.agents import Agents, Order, Report
from archon.inference.http import ConnectionBroken, Pool
from archon.records.messages import EpisodeWave, MemberResult

_CALL_TIMEOUT_S = 60.0
_PATIENCE_S = 60.0
_BEAT_S = 2.0


class GatewayRefused(ValueError):
    """The gateway said no; asking again cannot help."""


@dataclass(frozen=True)
class OpenSession:
    session_id: str
    api_key: str


class GatewayCalls:
    """The few calls of a rollout, cheap enough to be made for every episode."""

    def __init__(self, url: str, admin_key: str, policy: str) -> None:
        self.url, self._policy = url.rstrip("/"), policy
        self._pool = Pool(self.url, {"authorization": f"Bearer {admin_key}"}, 5.0)

    async def start(self, wave: EpisodeWave, member: int) -> OpenSession:
        body: dict[str, Any] = {
            "policy": self._policy,
            "task_id": wave.task_id,
            "trainable": wave.trainable,
            "labels": {
                "run": wave.run_id,
                "episode": str(wave.index),
                "member": str(member),
                "wave": str(wave.wave),
            },
        }
        if wave.group_id:
            body |= {"group_id": wave.group_id}
        answer = await self._call("POST", "/rl/start_session", body)
        return OpenSession(answer["session_id"], answer["api_key"])

    async def end(self, session_id: str) -> None:
        await self._call("POST", "/rl/end_session", {"session_id": session_id})

    async def reward(self, session_id: str) -> float | None:
        """What the session as a whole was paid, by all components; None where nobody paid."""
        answer = await self._call("GET", f"/rl/sessions/{session_id}", None)
        newest = {
            (r["component"], r["source"]): r["value"]
            for r in sorted(answer["rewards"], key=lambda r: r["seq"])
            if r["interaction_id"] is None and r["value"] is not None
        }
        return sum(newest.values()) if newest else None

    def close(self) -> None:
        self._pool.close()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Wait for a gateway that is away or busy, up to a minute."""
        deadline = time.monotonic() + _PATIENCE_S
        pause = 0.2
        while True:
            try:
                status, headers, answer = await self._once(method, path, body)
            except (OSError, ConnectionBroken) as error:
                status, headers, answer = 503, {}, f"{type(error).__name__}: {error}".encode()
            if status == 200:
                parsed: dict[str, Any] = json.loads(answer)
                return parsed
            what = f"{method} {path}: {status} {answer[:300].decode('utf-8', 'replace')}"
            if status not in (429, 500, 502, 503, 504):
                raise GatewayRefused(what)
            if time.monotonic() > deadline:
                raise GatewayRefused(f"{what} (for {_PATIENCE_S:.0f} s)")
            await asyncio.sleep(max(pause, _seconds(headers.get("retry-after"))))
            pause = min(2 * pause, 2.0)

    async def _once(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, dict[str, str], bytes]:
        data = None if body is None else json.dumps(body).encode()
        connection = await self._pool.exchange(method, path, data, _CALL_TIMEOUT_S)
        try:
            return connection.status, connection.headers, await connection.read(_CALL_TIMEOUT_S)
        finally:
            self._pool.release(connection)


def _seconds(header: str | None) -> float:
    try:
        return min(float(header or 0), 10.0)
    except ValueError:
        return 1.0


class Pace:
    """At most ``per_second`` episodes begin in a second; 0 is as fast as they come."""

    def __init__(self, per_second: float) -> None:
        self._gap = 1 / per_second if per_second else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        now = asyncio.get_running_loop().time()
        at = max(now, self._next)
        self._next = at + self._gap
        await asyncio.sleep(at - now)


class Members:
    """``results`` are what members came back with, in the order of their ends."""

    def __init__(self, gateway: GatewayCalls, agents: Agents, pace: Pace, record: Path) -> None:
        self._gateway, self._agents, self._pace, self._record = gateway, agents, pace, record
        record.parent.mkdir(parents=True, exist_ok=True)
        self.results: list[MemberResult] = []

    @activity.defn
    async def run_members(self, wave: EpisodeWave) -> list[MemberResult]:
        """Open a session for each member, let an agent play it, end it."""
        results: list[MemberResult] = []
        try:
            async with heartbeats(results, _BEAT_S), asyncio.TaskGroup() as group:
                for member in wave.members:
                    group.create_task(self._member(wave, member, results))
        except asyncio.CancelledError:
            if activity.is_worker_shutdown():
                raise ApplicationError(
                    "the rollout was stopped; start it again with the same --run-id",
                    results,
                    type="HostStopped",
                    category=ApplicationErrorCategory.BENIGN,
                ) from None
            raise
        return results

    async def _member(self, wave: EpisodeWave, member: int, results: list[MemberResult]) -> None:
        await self._pace.turn()
        started, session_id = time.monotonic(), ""
        episode = f"{wave.run_id}-{wave.index}-{member}-{wave.wave}"
        try:
            session = await self._gateway.start(wave, member)
            session_id = session.session_id
            order = Order(episode, self._gateway.url, session.api_key, session_id, wave.task)
            async with asyncio.timeout(wave.timeout):
                report = await self._agents.play(order)
            if not report.errors:
                await self._gateway.end(session_id)
                if report.reward is None:
                    report = Report(await self._gateway.reward(session_id), report.turns)
        except TimeoutError:
            report = Report(errors=[f"no end within {wave.timeout:g} s"])
        except (GatewayRefused, OSError) as error:
            report = Report(errors=[f"{type(error).__name__}: {error}"])
        result = MemberResult(
            member=member,
            session_id=session_id,
            ok=not report.errors,
            reward=report.reward,
            turns=report.turns,
            seconds=round(time.monotonic() - started, 3),
            error="; ".join(report.errors)[:300],
        )
        self._write(episode, wave.task_id, result, report.errors)
        results.append(result)
        self.results.append(result)

    def _write(self, episode: str, task_id: str, result: MemberResult, errors: list[str]) -> None:
        line = {
            "episode": episode,
            "session_id": result.session_id,
            "task_id": task_id,
            "reward": result.reward,
            "turns": result.turns,
            "seconds": result.seconds,
            "errors": errors,
        }
        with self._record.open("a") as file:
            file.write(json.dumps(line) + "\n")
