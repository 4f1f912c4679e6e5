"""Runs a whole stack: starts it in order, keeps it alive, ends it in order.

Invariant: while this process lives, every process of the stack lives or is being started again;
when it ends, however it ends, they end. What was acknowledged is on disk by then.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from archon.records.messages import main_queue, trainer_queue
from archon.settings import Settings
from archon.stack import postgres, probes, temporal
from archon.stack.bootstrap import write_rows
from archon.stack.child import Child, Probe
from archon.stack.errors import StackError
from archon.stack.logs import log_file, trim_for_ever
from archon.stack.migrate import create_database, migrate
from archon.stack.plan import Plan, make_folders, make_plan, make_secrets
from archon.stack.process import Spec, python
from archon.stack.state import Lock, ended_unclean, write_state

if TYPE_CHECKING:
    from temporalio.client import Client

START_TIMEOUT_S = 180.0
_STOP_ORDER = (("gateway",), ("worker", "trainer", "rep_"), ("temporal", "postgres"))


class Supervisor:
    """``say`` gets a line for people whenever something happens to a process."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self.plan, self._say = plan, say
        self.children: dict[str, Child] = {}
        self._status = "starting"
        self._postgres_shown = ""
        self._client: Client | None = None
        self._tasks: asyncio.TaskGroup
        self._unclean = ended_unclean(plan.run_dir)

    async def run(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Start everything, call ``ready``, stay until ``stop`` is set, end everything."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                trimming = self._tasks.create_task(trim_for_ever(self.plan.logs_dir))
                starting = self._tasks.create_task(self._start_within(START_TIMEOUT_S))
                stopping = asyncio.create_task(stop.wait())
                await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not stop.is_set():
                    await starting
                    self._status = "ready"
                    self._write_state()
                    ready()
                    await stopping
                starting.cancel()
                trimming.cancel()
                await self._stop_all()
        except BaseExceptionGroup as group:
            raise _first_cause(group) from group
        finally:
            await self._stop_all()
            self._status = "stopped"
            self._write_state()

    async def _start_within(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._start()
        except TimeoutError:
            waiting = [name for name, child in self.children.items() if not child.ready.is_set()]
            raise StackError(
                f"not ready after {timeout:.0f} s; still starting: {', '.join(waiting)}. "
                f"Look at {self.plan.logs_dir}."
            ) from None

    async def _start(self) -> None:
        plan = self.plan
        make_secrets(plan.settings)
        for replica in plan.replicas:
            if replica.port:
                probe = probes.http_answers("127.0.0.1", replica.port)
                self._add(plan.replica_spec(replica), probe)
        temporal_ready = asyncio.create_task(self._start_temporal())
        try:
            url = await self._start_postgres()
            await asyncio.to_thread(write_rows, url, plan.settings, plan.replicas)
            await temporal_ready
        finally:
            temporal_ready.cancel()
        self._start_python(url)
        settings = plan.settings
        await temporal.start_policy_workflows(
            self._connected(), settings.tenant, settings.policies, settings.temporal.queue_prefix
        )
        await asyncio.gather(*(child.ready.wait() for child in self.children.values()))

    async def _start_postgres(self) -> str:
        plan = self.plan
        if plan.settings.postgres.url is not None:
            url = plan.settings.postgres.url.get_secret_value()
            if not await probes.eventually(probes.postgres_answers(url), 10):
                raise StackError("the PostgreSQL of postgres.url does not answer.")
        else:
            server = await asyncio.to_thread(
                postgres.prepare,
                plan.data_dir / "postgres",
                plan.settings.secrets_dir / "postgres.password",
            )
            first = server.url("postgres")
            child = self._add(server.spec(), probes.postgres_answers(first), self._patience())
            await child.ready.wait()
            await asyncio.to_thread(create_database, first, "archon")
            url = server.url()
        self._postgres_shown = _without_password(url)
        await asyncio.to_thread(migrate, url)
        return url

    async def _start_temporal(self) -> None:
        plan = self.plan
        if plan.own_temporal:
            probe = probes.port_listens("127.0.0.1", plan.temporal_port)
            child = self._add(plan.temporal_spec(), probe, self._patience())
            await child.ready.wait()
        namespace = plan.settings.temporal.namespace
        self._client = await temporal.connect(plan.temporal_address, namespace, timeout=30)
        if plan.own_temporal:
            await temporal.set_retention(self._client)
        await temporal.register_search_attributes(self._client)

    def _start_python(self, postgres_url: str) -> None:
        plan = self.plan
        prefix = plan.settings.temporal.queue_prefix
        env = plan.environment(postgres_url)
        worker_polls = probes.queue_is_polled(self._connected, main_queue(prefix), workflows=True)
        trainer_polls = probes.queue_is_polled(
            self._connected, trainer_queue(prefix), workflows=False
        )
        gateway_answers = probes.http_answers(
            _reachable(plan.settings.gateway.host), plan.gateway_port
        )
        self._add(Spec("gateway", python("gateway"), env), gateway_answers)
        self._add(Spec("worker", python("activities.worker"), env), worker_polls)
        self._add(Spec("trainer", python("activities.trainer"), env), trainer_polls)

    def _connected(self) -> "Client":
        assert self._client is not None, "used before Temporal was connected"
        return self._client

    def _patience(self) -> int:
        """How often a server is started before that is an error.

        After an unclean end the one before may still be on its way out, holding its lock.
        """
        return 12 if self._unclean else 1

    def _add(self, spec: Spec, probe: Probe, tries: int = 1) -> Child:
        child = Child(
            spec,
            probe,
            log_file(self.plan.logs_dir, spec.name),
            say=self._say,
            changed=self._write_state,
            start_tries=tries,
        )
        self.children[spec.name] = child
        self._tasks.create_task(child.run(), name=spec.name)
        return child

    async def _stop_all(self) -> None:
        if self._status == "stopped":
            return
        self._status = "stopping"
        for stage in _STOP_ORDER:
            await asyncio.gather(*(child.stop() for child in self._children_of(stage)))

    def _children_of(self, stage: tuple[str, ...]) -> Iterable[Child]:
        return [child for name, child in self.children.items() if name.startswith(stage)]

    def _write_state(self) -> None:
        plan = self.plan
        write_state(
            plan.run_dir,
            {
                "status": self._status,
                "supervisor": os.getpid(),
                "written_at": time.time(),
                "gateway": plan.gateway_url,
                "temporal": plan.temporal_address,
                "temporal_ui": plan.temporal_ui,
                "postgres": self._postgres_shown,
                "replicas": [
                    {"replica_id": r.replica_id, "policy_id": r.policy_id, "url": r.url}
                    for r in plan.replicas
                ],
                "pids": {n: c.pid for n, c in self.children.items() if c.pid is not None},
                "processes": {n: c.describe() for n, c in self.children.items()},
            },
        )


def up(
    settings: Settings,
    flags: dict[str, Any],
    say: Callable[[str], None],
    ready: Callable[[Plan], None],
) -> None:
    """Run a stack in this process until SIGTERM, SIGINT or SIGHUP.

    StackError where it cannot start. ``settings`` has passed ``plan.check``. ``flags`` are the
    settings given on the command line, in nested form: the children get them too.
    """
    make_folders(settings)
    lock = Lock(settings.run_dir)
    lock.take()
    try:
        plan = make_plan(settings, flags)
        asyncio.run(_supervise(plan, say, lambda: ready(plan)))
    finally:
        lock.release()


async def _supervise(plan: Plan, say: Callable[[str], None], ready: Callable[[], None]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, stop.set)
    await Supervisor(plan, say).run(stop, ready)


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=user.partition(":")[0] + at + host).geturl()
