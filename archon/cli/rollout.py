"""``archon rollout``: agents play tasks, group by group, and can be stopped and resumed.

Invariant: an episode is a workflow whose id is the run's id and its number, so a run that is
started again with the same id goes on where it was: what is finished is not played again.
"""

import asyncio
import functools
import json
import math
import random
import secrets
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import (
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from activities.workers import DEPLOYMENT
from archon.cli.agents import Agents, make_agents
from archon.cli.members import GatewayCalls, Members, Pace
from archon.cli.settings import flags, load
from archon.cli.show import Show
from archon.records.messages import (
    ATTR_POLICY,
    ATTR_TENANT,
    EpisodeInput,
    EpisodeResult,
    PolicyStatus,
    agents_queue,
    episode_workflow_id,
    main_queue,
    policy_workflow_id,
)
from archon.settings import Settings
from archon.stack.errors import StackError
from archon.stack.state import holder, read_state

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_STATUS_EVERY_S = 2.0
_HEARTBEATS = timedelta(seconds=2)
_AWAY = (
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.RESOURCE_EXHAUSTED,
    RPCStatusCode.UNKNOWN,
)
T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    task_id: str
    body: dict[str, object]


@dataclass(frozen=True)
class Run:
    """Everything about one rollout run that its episodes share."""

    run_id: str
    tenant_id: str
    policy_id: str
    queue_prefix: str
    tasks: list[Task]
    group_size: int
    concurrency: int
    timeout: float
    max_replacements: int
    trainable: bool

    def episode(self, index: int) -> EpisodeInput:
        task = self.tasks[index]
        return EpisodeInput(
            run_id=self.run_id,
            index=index,
            tenant_id=self.tenant_id,
            policy_id=self.policy_id,
            task_id=task.task_id,
            task=task.body,
            size=self.group_size,
            queue_prefix=self.queue_prefix,
            episode_timeout=self.timeout,
            max_replacements=self.max_replacements,
            trainable=self.trainable,
        )


@dataclass
class Tally:
    """What the run has come to. ``rewards`` are those of finished members, oldest first."""

    groups: int = 0
    finished: int = 0
    failed: int = 0
    replaced: int = 0
    rewards: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, result: EpisodeResult) -> None:
        self.groups += 1
        self.finished += result.finished
        self.failed += result.failed
        self.replaced += result.replaced
        self.rewards += result.rewards
        self.errors += result.errors


def read_tasks(file: Path, epochs: int, seed: int | None) -> list[Task]:
    """A JSON object a line; each epoch in an order of its own where there is a seed."""
    tasks: list[Task] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except json.JSONDecodeError as error:
            raise StackError(f"{file}, line {number}: {error}") from error
        if not isinstance(body, dict):
            raise StackError(f"{file}, line {number}: a task is a JSON object, not {line[:40]!r}")
        tasks.append(Task(str(body.get("task_id", body.get("id", f"task-{number}"))), body))
    if not tasks:
        raise StackError(f"{file} has no tasks: write one JSON object a line")
    out: list[Task] = []
    for epoch in range(epochs):
        order = list(tasks)
        if seed is not None:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        out += order
    return out


class Driver:
    """Starts the episodes' workflows, a number at a time, and gathers how they end."""

    def __init__(self, client: Client, run: Run) -> None:
        self._client, self._run = client, run
        self.tally = Tally()
        self.resumed = 0

    async def drive(self) -> None:
        """Return when every episode has ended."""
        indices = iter(range(len(self._run.tasks)))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._run.concurrency, len(self._run.tasks))):
                group.create_task(self._lane(indices))

    async def _lane(self, indices: Iterator[int]) -> None:
        for index in indices:
            handle = await _patiently(functools.partial(self._started, index))
            try:
                self.tally.add(await _patiently(handle.result))
            except WorkflowFailureError as error:
                self.tally.groups += 1
                self.tally.failed += self._run.group_size
                self.tally.errors.append(f"{handle.id}: {error.cause}")

    async def _started(self, index: int) -> WorkflowHandle[Any, EpisodeResult]:
        run = self._run
        name = episode_workflow_id(run.run_id, index)
        try:
            await self._client.start_workflow(
                "EpisodeWorkflow",
                run.episode(index),
                id=name,
                task_queue=main_queue(run.queue_prefix),
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                search_attributes=_attributes(run),
            )
        except WorkflowAlreadyStartedError:
            self.resumed += 1
        return self._client.get_workflow_handle(name, result_type=EpisodeResult)


async def _patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The outcome of a call to Temporal, however long Temporal is away."""
    while True:
        try:
            return await call()
        except RPCError as error:
            if error.status not in _AWAY:
                raise
            await asyncio.sleep(0.5)


def _attributes(run: Run) -> TypedSearchAttributes:
    return TypedSearchAttributes(
        [
            SearchAttributePair(SearchAttributeKey.for_keyword(ATTR_TENANT), run.tenant_id),
            SearchAttributePair(SearchAttributeKey.for_keyword(ATTR_POLICY), run.policy_id),
        ]
    )


async def policy_status(client: Client, run: Run) -> PolicyStatus | None:
    """What the policy's workflow says, None where it does not answer."""
    handle = client.get_workflow_handle(policy_workflow_id(run.tenant_id, run.policy_id))
    try:
        status: PolicyStatus = await handle.query("status", result_type=PolicyStatus)
    except RPCError:
        return None
    return status


async def play(
    client: Client, run: Run, gateway: GatewayCalls, agents: Agents, rate: float, record: Path
) -> tuple[Tally, bool]:
    """The whole run; False with its tally where a signal ended it before its end."""
    members = Members(gateway, agents, Pace(rate), record)
    driver = Driver(client, run)
    show = Show(len(run.tasks) * run.group_size)
    worker = Worker(
        client,
        task_queue=agents_queue(run.queue_prefix, run.run_id),
        activities=[members.run_members],
        max_concurrent_activities=run.concurrency,
        max_heartbeat_throttle_interval=_HEARTBEATS,
        default_heartbeat_throttle_interval=_HEARTBEATS,
        deployment_config=DEPLOYMENT,
    )
    with show:
        async with worker:
            ended = await _until_it_ends_or_is_stopped(client, run, driver, members, show)
    await agents.close()
    gateway.close()
    return driver.tally, ended


async def _until_it_ends_or_is_stopped(
    client: Client, run: Run, driver: Driver, members: Members, show: Show
) -> bool:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    driving = asyncio.create_task(driver.drive())
    watching = asyncio.create_task(_watch(client, run, driver, members, show))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({driving, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
    ended = driving.done()
    for task in (driving, watching, stopping):
        task.cancel()
    for outcome in await asyncio.gather(driving, watching, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    return ended


async def _watch(client: Client, run: Run, driver: Driver, members: Members, show: Show) -> None:
    asked, status = -math.inf, None
    while True:
        if time.monotonic() - asked > _STATUS_EVERY_S:
            status, asked = await policy_status(client, run), time.monotonic()
        show.update(members.results, driver.tally.failed, driver.resumed, status)
        await asyncio.sleep(0.25)


def summary(run: Run, tally: Tally, seconds: float) -> list[tuple[str, str]]:
    """The lines of the table at the end."""
    rewards = tally.rewards
    error = statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0
    mean = f"{statistics.fmean(rewards):.3f} ± {error:.3f}" if rewards else "none was reported"
    rows = [
        ("run", run.run_id + ("" if run.trainable else " (evaluation)")),
        ("groups", f"{tally.groups} of {len(run.tasks)}"),
        ("episodes", f"{tally.finished} finished, {tally.failed} failed"),
        ("replaced", f"{tally.replaced} agent runs"),
        ("reward", mean),
        ("time", f"{seconds:.1f} s, {tally.finished / max(seconds, 1e-9):.1f} episodes/s"),
    ]
    if run.trainable and (quarter := len(rewards) // 4):
        first, last = statistics.fmean(rewards[:quarter]), statistics.fmean(rewards[-quarter:])
        rows.append(("first, last quarter", f"{first:.3f}, {last:.3f}"))
    return rows


@app.command()
def rollout(
    tasks: Annotated[Path, typer.Option(help="Tasks, a JSON object a line.")],
    agent: Annotated[str, typer.Option(help="Command that plays an episode.")],
    group_size: Annotated[int, typer.Option(min=1, help="Agents per task.")] = 8,
    policy: Annotated[str | None, typer.Option(help="Policy; default: the only one.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Groups at once.")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="Episodes a second at most; 0: any.")] = 0.0,
    agents: Annotated[int, typer.Option(min=1, help="Processes, for --agent-mode lines.")] = 1,
    agent_mode: Annotated[
        str, typer.Option(help="once: a process per episode; lines: an episode per line; auto.")
    ] = "auto",
    epochs: Annotated[int, typer.Option("--epochs", "--repeat", min=1, help="Passes.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Shuffle the tasks by this.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Name of the run; resumes one.")] = None,
    evaluate: Annotated[bool, typer.Option("--eval", help="Score only; train on none.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for an episode.")] = 600.0,
    max_replacements: Annotated[int, typer.Option(min=0, help="Per member of a group.")] = 2,
    gateway: Annotated[str | None, typer.Option(help="Address of the gateway.")] = None,
    key: Annotated[str | None, typer.Option(help="Admin key.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the installation.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file.")] = None,
) -> int:
    """Let agents play tasks: a group of agents per task, whose lost members are replaced."""
    settings = load(config, flags({"data_dir": data_dir}))
    run = Run(
        run_id=run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        tenant_id=settings.tenant,
        policy_id=_policy(settings, policy),
        queue_prefix=settings.temporal.queue_prefix,
        tasks=read_tasks(tasks, epochs, seed),
        group_size=group_size,
        concurrency=concurrency,
        timeout=timeout,
        max_replacements=max_replacements,
        trainable=not evaluate,
    )
    where = _addresses(settings, gateway)
    calls = GatewayCalls(where["gateway"], key or _admin_key(settings), run.policy_id)
    record = settings.run_dir / "rollouts" / f"{run.run_id}.jsonl"
    begun = time.monotonic()

    async def whole() -> tuple[Tally, bool]:
        client = await Client.connect(where["temporal"], namespace=settings.temporal.namespace)
        players = make_agents(agent, agent_mode, agents)
        return await play(client, run, calls, players, rate, record)

    tally, ended = asyncio.run(whole())
    Show.table(summary(run, tally, time.monotonic() - begun), tally.errors)
    if not ended:
        typer.echo(f"stopped; go on with --run-id {run.run_id}", err=True)
        return 130
    return 1 if tally.failed else 0


def _policy(settings: Settings, named: str | None) -> str:
    if named is None and len(settings.policies) == 1:
        return next(iter(settings.policies))
    if named not in settings.policies:
        known = ", ".join(settings.policies) or "none"
        raise StackError(f"which policy? Name one with --policy; known are: {known}")
    return named


def _addresses(settings: Settings, gateway: str | None) -> dict[str, str]:
    state = read_state(settings.run_dir) if holder(settings.run_dir) is not None else {}
    found = {
        "gateway": gateway or state.get("gateway"),
        "temporal": settings.temporal.address or state.get("temporal"),
    }
    if missing := [name for name, address in found.items() if not address]:
        raise StackError(
            f"Archon is not running on {settings.data_dir.absolute()}: where is its "
            f"{' and its '.join(missing)}? Start it with `archon up`."
        )
    return {name: str(address) for name, address in found.items()}


def _admin_key(settings: Settings) -> str:
    file = settings.secrets_dir / "admin.key"
    try:
        return file.read_text().strip()
    except OSError as error:
        why = f"cannot read the admin key {file}: {error.strerror}"
        raise StackError(f"{why}. Give --key.") from error
