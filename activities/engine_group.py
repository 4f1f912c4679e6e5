"""The training engine as a process group of its own, spoken to in JSON lines.

Invariant: whoever asks for an operation gets its outcome or an :class:`EngineLost`; a group that
died, fell silent, spoke nonsense or was abandoned in the middle of an operation is killed whole,
and the next operation starts a new one.
"""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from activities.processes import kill_child, start_child

log = logging.getLogger(__name__)
Event = dict[str, Any]
_OUTCOMES = ("done", "empty_signal", "error")


class EngineLost(RuntimeError):
    """The group ended, or was ended, before the operation had an outcome."""


class EngineGroup:
    """``silence`` is how long the engine may be quiet beyond the longest pause known of the span
    that it is in; ``patience`` is allowed while a span has no history (and at the start)."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        silence: float = 10.0,
        patience: float = 120.0,
    ) -> None:
        self._command, self._env = list(command), dict(env or {})
        self._silence, self._patience = silence, patience
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=40)
        self._longest: dict[str, float] = {}
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def warm(self) -> None:
        """Start the engine, so that the first operation need not wait for it."""
        async with self._lock:
            await self._ensure()

    async def operate(self, operation: Event) -> AsyncGenerator[Event]:
        """Send one operation; yields its events, the last of which is its outcome."""
        async with self._lock:
            finished = False
            try:
                process = await self._ensure()
                await self._send(process, operation)
                span = str(operation["op"])
                while not finished:
                    event = await self._event(process, span)
                    span = f"{operation['op']}/{event.get('span', '')}"
                    finished = event["event"] in _OUTCOMES
                    yield event
            finally:
                if not finished:
                    await self.kill()

    async def kill(self) -> None:
        """End the group at once."""
        process, self._process = self._process, None
        if process is not None:
            await kill_child(process)
        if self._drain is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._drain
            self._drain = None

    async def stop(self, grace: float = 1.0) -> None:
        """End of stdin asks an idle engine to leave; after ``grace`` seconds it is killed."""
        process = self._process
        if process is not None and process.stdin is not None and not self._lock.locked():
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await process.wait()
        await self.kill()

    async def _ensure(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.kill()
        self._tail.clear()
        self._process = await start_child(self._command, self._env)
        self._drain = asyncio.create_task(self._drain_stderr(self._process))
        try:
            event = await self._event(self._process, "start")
            if event["event"] != "ready":
                raise EngineLost(f"the engine began with {event!r} instead of ready")
        except BaseException:
            await self.kill()
            raise
        return self._process

    async def _send(self, process: asyncio.subprocess.Process, operation: Event) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(operation).encode() + b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise await self._lost(process, "it closed its stdin", ended=True) from error

    async def _event(self, process: asyncio.subprocess.Process, span: str) -> Event:
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        begin = loop.time()
        allowed = self._silence + self._longest.get(span, self._patience)
        while True:
            try:
                async with asyncio.timeout_at(begin + allowed):
                    line = await process.stdout.readline()
            except TimeoutError as error:
                raise await self._lost(process, f"silent for {allowed:.1f} s in {span}") from error
            except ValueError as error:
                raise await self._lost(process, f"a line without end in {span}") from error
            if not line.endswith(b"\n"):
                raise await self._lost(process, f"it ended in {span}", ended=True)
            if (event := self._parse(line)) is None:
                continue
            self._longest[span] = max(self._longest.get(span, 0.0), loop.time() - begin)
            return event

    def _parse(self, line: bytes) -> Event | None:
        """An event, or None for what is not one: libraries print to stdout as they please."""
        text = line.decode("utf-8", "replace").strip()
        try:
            event = json.loads(text)
        except json.JSONDecodeError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            return event
        self._tail.append(f"(stdout) {text[:500]}")
        return None

    async def _lost(
        self, process: asyncio.subprocess.Process, what: str, ended: bool = False
    ) -> EngineLost:
        if ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await process.wait()
        status = process.returncode
        await self.kill()
        tail = "\n".join(self._tail) or "(nothing on stderr)"
        return EngineLost(
            f"training engine (pid {process.pid}, exit status {status}): {what}; "
            f"the step is tried again. It last said:\n{tail}"
        )

    async def _drain_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:
                line = b"(a line too long to keep)\n"
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._tail.append(text[:2000])
            log.info("engine[%d] %s", process.pid, text)
