"""The decoding thread: admits requests, steps, delivers, and obeys between two steps.

Invariants. Everything that changes what is sampled (a swap of weights, pause, resume) happens
between two steps, on this thread, and is answered only then: so no token is sampled after the
answer to a pause, and none by old weights after the answer to an update. A row that was accepted
gets exactly one last output, unless its client left. The thread waits on a condition and never
polls; if it fails, every row is told and the process ends.
"""

import asyncio
import logging
import math
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from engine.serving.rows import Row, Rows
from engine.serving.runner import Runner, Sampled
from engine.serving.weights import Weights
from engine.serving.wire import Output, Refusal, Request

log = logging.getLogger("archon.engine")

Delivery = tuple[Row, Output]


class Scheduler:
    """All but `_…` belongs to the event loop's thread."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_queue: int,
        threads: int,
        loop: asyncio.AbstractEventLoop,
        on_crash: Callable[[], None],
    ) -> None:
        self.runner = runner
        self.paused = False
        self._rows = Rows()
        self._max_queue = max_queue
        self._threads = threads
        self._loop = loop
        self._on_crash = on_crash
        self._condition = threading.Condition()
        self._queue: deque[Row] = deque()
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._abandoned = False
        self._stopped = False
        self._crash: str | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, request: Request, deliver: Callable[[Output], None]) -> Row:
        seed = secrets.randbits(64) if request.seed is None else request.seed
        row = Row(request, seed, deliver, list(request.token_ids))
        with self._condition:
            if self._crash is not None:
                raise Refusal(503, self._crash)
            waiting = len(self._queue) + len(self._rows) - self.runner.max_batch
            if waiting >= self._max_queue:
                raise Refusal(503, f"the queue is full with {waiting} requests")
            self._queue.append(row)
            self._condition.notify()
        return row

    def abandon(self, row: Row) -> None:
        """Its client left: the slot is free before the next step."""
        with self._condition:
            row.abandoned = self._abandoned = True
            self._condition.notify()

    async def pause(self, abort_running: bool) -> None:
        await self._command(lambda: self._pause(abort_running))

    async def resume(self) -> None:
        await self._command(self._resume)

    async def swap(self, weights: Weights) -> None:
        await self._command(lambda: self._swap(weights))

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify()
        self._thread.join(10)

    async def _command(self, apply: Callable[[], None]) -> None:
        done: Future[None] = Future()
        with self._condition:
            if self._crash is not None:
                raise Refusal(503, self._crash)
            self._commands.append((apply, done))
            self._condition.notify()
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._wait():
                self._deliver(self._step())
        except BaseException as e:
            log.exception("the decoding thread failed")
            self._fail(f"the engine failed: {e!r}")
            raise

    def _wait(self) -> bool:
        """Return when there is something to step, having obeyed all commands; False at the end."""
        while True:
            with self._condition:
                while not (self._commands or self._abandoned or self._stopped or self._can_step()):
                    self._condition.wait()
                if self._stopped:
                    return False
                commands, self._commands = self._commands, deque()
                if self._abandoned:
                    self._drop_abandoned()
            for apply, done in commands:
                self._obey(apply, done)
            with self._condition:
                if not self._can_step():
                    continue
                while self._queue and len(self._rows) < self.runner.max_batch:
                    self._rows.rows.append(self._queue.popleft())
            return True

    def _obey(self, apply: Callable[[], None], done: Future[None]) -> None:
        try:
            apply()
        except BaseException as e:
            done.set_exception(e)
            raise
        done.set_result(None)

    def _can_step(self) -> bool:
        return not self.paused and bool(self._rows.rows or self._queue)

    def _drop_abandoned(self) -> None:
        self._abandoned = False
        self._queue = deque(row for row in self._queue if not row.abandoned)
        for slot in reversed(range(len(self._rows))):
            if self._rows.rows[slot].abandoned:
                self._rows.remove(slot, self.runner.cache)

    def _pause(self, abort_running: bool) -> None:
        self.paused = True
        if abort_running:
            rows, self._rows = self._rows, Rows()
            self._deliver([(row, row.output("abort")) for row in rows.rows])

    def _resume(self) -> None:
        self.paused = False

    def _swap(self, weights: Weights) -> None:
        self.runner.swap(weights)
        self._rows.forget_cache()

    def _step(self) -> list[Delivery]:
        sampled = self.runner.step(self._rows)
        assert self.runner.weights is not None
        version = self.runner.weights.version
        deliveries: list[Delivery] = []
        finished: list[int] = []
        for s in sampled:
            row = self._rows.rows[s.slot]
            output = self._advance(row, s, version)
            if output.last:
                finished.append(s.slot)
            if output.last or row.request.stream:
                deliveries.append((row, output))
        # From behind: then rows that end together need no copying.
        for slot in sorted(finished, reverse=True):
            self._rows.remove(slot, self.runner.cache)
        return deliveries

    def _advance(self, row: Row, s: Sampled, version: int) -> Output:
        if not math.isfinite(s.logprob):
            self.runner.cache.clear(s.slot)
            return row.output(error=f"log-prob {s.logprob} of token {s.token_id} under {version}")
        reason = row.append(s.token_id, s.logprob, version)
        return row.output(reason) if reason or row.request.stream else _NOTHING

    def _deliver(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._loop.call_soon_threadsafe(_hand_over, deliveries)

    def _fail(self, message: str) -> None:
        with self._condition:
            self._crash = message
            rows = [*self._rows.rows, *self._queue]
            commands = list(self._commands)
        for _, done in commands:
            done.set_exception(Refusal(503, message))
        self._deliver([(row, row.output(error=message)) for row in rows])
        self._loop.call_soon_threadsafe(self._on_crash)


_NOTHING = Output(0, [], [], [])


def _hand_over(deliveries: list[Delivery]) -> None:
    for row, output in deliveries:
        row.deliver(output)
