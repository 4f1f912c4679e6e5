"""Agents as processes: one per episode, or long-lived ones that play an episode per line.

Invariant: an agent learns a base URL, a session's key and its task, and nothing else of Archon.
What it leaves behind, a process or an unanswered episode, ends with the rollout.
"""

import asyncio
import contextlib
import json
import shlex
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from activities.processes import kill_child, start_child

MODES = ("auto", "once", "lines")
_TAIL_LINES = 20


@dataclass(frozen=True)
class Order:
    """One episode to be played."""

    episode: str
    gateway: str
    api_key: str
    session_id: str
    task: Mapping[str, object]

    @property
    def base_url(self) -> str:
        return f"{self.gateway}/v1"

    def line(self) -> bytes:
        fields = {
            "episode": self.episode,
            "base_url": self.base_url,
            "api_key": self.api_key,
            "task": self.task,
        }
        return json.dumps(fields).encode() + b"\n"

    def environment(self) -> dict[str, str]:
        """What ordinary agents read; without the task, by which a process knows it is for one."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.gateway,
            "ANTHROPIC_API_KEY": self.api_key,
            "ARCHON_SESSION": self.session_id,
            "ARCHON_EPISODE": self.episode,
        }


@dataclass(frozen=True)
class Report:
    """How an episode went, as far as its agent said; an error makes it a failure."""

    reward: float | None = None
    turns: int = 0
    errors: list[str] = field(default_factory=list)


class Agents(Protocol):
    async def play(self, order: Order) -> Report: ...

    async def close(self) -> None: ...


def make_agents(command: str, mode: str, processes: int) -> Agents:
    words = shlex.split(command)
    if not words:
        raise ValueError("--agent is empty: give the command that plays an episode")
    if mode == "once":
        return OnceAgents(words)
    if mode == "lines":
        return LineAgents(words, processes)
    if mode == "auto":
        return AutoAgents(words, processes)
    raise ValueError(f"--agent-mode {mode}: known are {', '.join(MODES)}")


def parse_report(line: bytes | str) -> tuple[str, Report] | None:
    """The episode that a line is about, and its report; None for any other line."""
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict) or "episode" not in fields:
            return None
        reward = fields.get("reward")
        return str(fields["episode"]), Report(
            None if reward is None else float(reward),
            int(fields.get("turns") or 0),
            [str(e)[:300] for e in fields.get("errors") or []],
        )
    except (ValueError, TypeError):
        return None


class OnceAgents:
    """A process for each episode; a status other than 0 is a failure."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._running: set[asyncio.subprocess.Process] = set()

    async def play(self, order: Order) -> Report:
        environment = {**order.environment(), "ARCHON_TASK": json.dumps(order.task)}
        process = await start_child(self._command, environment)
        self._running.add(process)
        try:
            out, err = await process.communicate()
        finally:
            await kill_child(process)
            self._running.discard(process)
        lines = out.splitlines()
        named = parse_report(lines[-1]) if lines else None
        report = named[1] if named else Report()
        if process.returncode and not report.errors:
            tail = err.decode("utf-8", "replace").strip()[-300:]
            return Report(errors=[f"the agent ended with status {process.returncode}: {tail}"])
        return report

    async def close(self) -> None:
        for process in list(self._running):
            await kill_child(process)


class LineAgents:
    """``processes`` agents that take an order a line and answer with a report a line."""

    def __init__(self, command: list[str], processes: int) -> None:
        self._players = [LinePlayer(command) for _ in range(processes)]

    async def play(self, order: Order) -> Report:
        return await min(self._players, key=lambda p: p.busy).play(order)

    async def close(self) -> None:
        for player in self._players:
            await player.close()


class LinePlayer:
    """One long-lived process. If it ends, its orders fail, and the next one starts it again."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = command, dict(environment or {})
        self._pending: dict[str, asyncio.Future[Report]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._starting = asyncio.Lock()
        self._deaths = 0
        self.answered = 0
        """How many orders it reported on."""

    @property
    def busy(self) -> int:
        return len(self._pending)

    async def play(self, order: Order) -> Report:
        done = asyncio.get_running_loop().create_future()
        self._pending[order.episode] = done
        try:
            process = await self._running()
            assert process.stdin is not None
            process.stdin.write(order.line())
            await process.stdin.drain()
            return await done
        except (BrokenPipeError, ConnectionResetError):
            return await done
        finally:
            self._pending.pop(order.episode, None)

    async def close(self) -> None:
        if self._process is not None:
            await kill_child(self._process)
        for task in self._readers:
            task.cancel()

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None:
                await asyncio.sleep(min(0.2 * self._deaths, 5.0))
                self._process = await start_child(self._command, self._environment)
                self._readers = [
                    asyncio.create_task(self._read(self._process)),
                    asyncio.create_task(self._drain(self._process)),
                ]
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            named = parse_report(line)
            waiting = self._pending.get(named[0]) if named else None
            if named is None or waiting is None:
                self._tail.append(line.decode("utf-8", "replace").rstrip())
            elif not waiting.done():
                self.answered, self._deaths = self.answered + 1, 0
                waiting.set_result(named[1])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await process.wait()
        await kill_child(process)
        self._process, self._deaths = None, self._deaths + 1
        tail = " | ".join(self._tail)[-300:]
        lost = Report(errors=[f"the agent ended with status {process.returncode}: {tail}"])
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_result(lost)

    async def _drain(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self._tail.append(line.decode("utf-8", "replace").rstrip())


class AutoAgents:
    """Finds out with the first episode: an agent that answers its line is long-lived.

    One that ends without an answer is started anew for each episode, that one included.
    """

    def __init__(self, command: list[str], processes: int) -> None:
        self._command, self._processes = command, processes
        self._agents: Agents | None = None
        self._choosing = asyncio.Lock()

    async def play(self, order: Order) -> Report:
        if self._agents is None:
            async with self._choosing:
                if self._agents is None:
                    return await self._first(order)
        return await self._agents.play(order)

    async def close(self) -> None:
        if self._agents is not None:
            await self._agents.close()

    async def _first(self, order: Order) -> Report:
        player = LinePlayer(self._command, order.environment())
        try:
            report = await player.play(order)
        finally:
            await player.close()
        if player.answered:
            self._agents = LineAgents(self._command, self._processes)
            return report
        self._agents = OnceAgents(self._command)
        return await self._agents.play(order)
