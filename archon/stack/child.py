"""One supervised process: started, watched until it answers, started again when it dies.

Invariant: at most one process per child. A child that dies before it ever answered is an error of
the start; afterwards it is started again, at once at first, then with growing pauses.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from archon.stack.errors import StackError
from archon.stack.logs import last_lines, open_log
from archon.stack.process import Spec, command_line, popen_arguments

Probe = Callable[[float], Awaitable[bool]]
"""Whether the process that was started at this time (seconds of the epoch) answers."""

_PROBE_S = 0.05
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_STEADY_S = 10.0


class Child:
    """``say`` is told of deaths and restarts; ``changed`` of every change of state."""

    def __init__(
        self,
        spec: Spec,
        probe: Probe,
        log: Path,
        *,
        say: Callable[[str], None],
        changed: Callable[[], None],
        start_tries: int = 1,
    ) -> None:
        self.spec, self._probe, self._log = spec, probe, log
        self._say, self._changed, self._start_tries = say, changed, start_tries
        self.ready = asyncio.Event()
        self.pid: int | None = None
        self.started_at = 0.0
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._ready_at = 0.0
        self._stopping = False

    @property
    def state(self) -> str:
        if self._process is None:
            return "stopped" if self._stopping else "down"
        return "ready" if self.ready.is_set() else "starting"

    def describe(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "state": self.state,
            "restarts": self.restarts,
            "started_at": self.started_at,
        }

    async def run(self) -> None:
        """Keep the process alive until :meth:`stop`."""
        pause, was_ready, tries = _FIRST_PAUSE_S, False, 0
        while not self._stopping:
            code, steady = await self._live()
            if self._stopping:
                return
            was_ready = was_ready or steady is not None
            tries += 1
            if not was_ready and tries >= self._start_tries:
                raise self._failed_to_start(code)
            pause = _FIRST_PAUSE_S if (steady or 0.0) > _STEADY_S else pause
            self._say(f"{self.spec.name} ended ({_how(code)}); starting it again")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            self.restarts += 1

    async def _live(self) -> tuple[int, float | None]:
        """One life: the exit code, and for how long it was ready (None: never)."""
        descriptor = open_log(self._log)
        try:
            process = await asyncio.create_subprocess_exec(
                *command_line(self.spec), **popen_arguments(self.spec, descriptor)
            )
        except OSError as error:
            raise StackError(f"{self.spec.name} cannot be started: {error}") from error
        finally:
            os.close(descriptor)
        self._process, self.pid, self.started_at = process, process.pid, time.time()
        self._changed()
        watch = asyncio.create_task(self._watch())
        try:
            code = await process.wait()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        ready_for = time.time() - self._ready_at if self.ready.is_set() else None
        self.ready.clear()
        self._process, self.pid = None, None
        self._changed()
        return code, ready_for

    async def _watch(self) -> None:
        while not await self._probe(self.started_at):
            await asyncio.sleep(_PROBE_S)
        self._ready_at = time.time()
        self.ready.set()
        self._changed()

    def _failed_to_start(self, code: int) -> StackError:
        tail = "\n".join(f"  {line}" for line in last_lines(self._log, 20))
        return StackError(
            f"{self.spec.name} did not start ({_how(code)}). The end of {self._log}:\n{tail}"
        )

    async def stop(self) -> None:
        """End the process: asked first, killed after ``stop_timeout``."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        _signal(process, self.spec.stop_signal)
        try:
            await asyncio.wait_for(process.wait(), self.spec.stop_timeout)
        except TimeoutError:
            self._say(f"{self.spec.name} did not end in {self.spec.stop_timeout:.0f} s: killed")
            _signal(process, signal.SIGKILL)
            await process.wait()


def _signal(process: asyncio.subprocess.Process, signum: signal.Signals) -> None:
    if process.returncode is None:
        process.send_signal(signum)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"
