"""Sessions, calls and rewards as a gateway would leave them, and a trainer without an engine."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import sqlalchemy as sa

from archon.records import (
    Group,
    GroupState,
    Interaction,
    InteractionStatus,
    Policy,
    PolicySettings,
    PolicyVersion,
    Return,
    Reward,
    Sample,
    Session,
    SessionState,
    VersionState,
    dumps,
)
from archon.storage import Database
from archon.storage import tables as t
from archon.storage.rewards import put_reward
from archon.storage.rows import fetch_all, insert_record
from archon.storage.sealing import settle

TENANT, POLICY = "acme", "game"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def ints(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def floats(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def call(
    name: str,
    seq: int,
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (7,),
    *,
    parent: Interaction | None = None,
    previous: str | None = None,
    session: str = "ses_1",
    version: int = 0,
    at: float | None = None,
    **changes: Any,
) -> Interaction:
    """A complete call. With ``parent``, ``prompt`` is what follows the parent's answer."""
    before = _whole(parent) if parent else b""
    whole = before + ints(*prompt)
    time = NOW + timedelta(seconds=float(seq) if at is None else at)
    made = Interaction(
        interaction_id=name, session_id=session, tenant_id=TENANT, policy_id=POLICY, seq=seq,
        status=InteractionStatus.COMPLETE, protocol="openai.chat", request_digest=f"rq_{name}",
        messages_digest=f"ms_{name}", prompt_ids=ints(*prompt), prompt_length=len(whole) // 4,
        prompt_sha256=hashlib.sha256(whole).hexdigest(), output_ids=ints(*output),
        logprobs=floats(*[-0.5] * len(output)), support=bytes(len(output)),
        versions=[{"version": version, "start": 0, "end": len(output)}], sampling={},
        finish_reason="stop", started_at=time, ended_at=time + timedelta(seconds=0.5),
        prefix_parent=parent.interaction_id if parent else None,
        previous=previous or (parent.interaction_id if parent else None),
    )  # fmt: skip
    made = replace(made, **changes)
    _WHOLE[name] = whole + made.output_ids
    return made


_WHOLE: dict[str, bytes] = {}


def _whole(call: Interaction) -> bytes:
    """Prompt and output of an interaction made by :func:`call`."""
    return _WHOLE[call.interaction_id]


def chain(*outputs: Sequence[int], session: str = "ses_1", version: int = 0) -> list[Interaction]:
    """Calls that continue one another token by token; the environment says [3] in between."""
    calls: list[Interaction] = []
    for i, output in enumerate(outputs):
        name = f"int_{session}_{i + 1}"
        parent = calls[-1] if calls else None
        prompt = (3,) if parent else (1, 2)
        calls.append(
            call(name, i + 1, prompt, output, parent=parent, session=session, version=version)
        )
    return calls


def reward(
    value: float | None,
    seq: int = 1,
    *,
    interaction: str | None = None,
    session: str = "ses_1",
    at: float = 1000.0,
    **changes: Any,
) -> Reward:
    made = Reward(
        reward_id=f"rew_{session}_{seq}", session_id=session, tenant_id=TENANT, policy_id=POLICY,
        component="", source="", created_at=NOW + timedelta(seconds=at), value=value,
        interaction_id=interaction, seq=seq,
    )  # fmt: skip
    return replace(made, **changes)


class Scene:
    """Writes rows straight into the tables of one test's database.

    ``tag`` makes the names of the policy and of the first session the test's own: tests share a
    Temporal server.
    """

    def __init__(self, db: Database, tag: str = "") -> None:
        self.db = db
        self.policy_id, self.ses = (f"game-{tag}", f"ses_{tag}") if tag else (POLICY, "ses_1")

    def chain(self, *outputs: Sequence[int]) -> list[Interaction]:
        """Calls of the first session."""
        return chain(*outputs, session=self.ses)

    async def policy(self, **changes: Any) -> PolicySettings:
        """A policy with version 0 live."""
        fields: dict[str, Any] = {"model": "m", "batch_groups": 1, "close_grace": 0.0}
        settings = PolicySettings(**fields | changes)
        async with self.db.begin() as c:
            row = Policy(TENANT, self.policy_id, json.loads(dumps(settings)), NOW)
            await c.execute(insert_record(t.policy, row))
        await self.version(0, None, VersionState.LIVE)
        return settings

    async def version(
        self,
        number: int,
        parent: int | None,
        state: VersionState = VersionState.TRAINED,
    ) -> None:
        made = PolicyVersion(
            tenant_id=TENANT, policy_id=self.policy_id, version=number, parent=parent, state=state,
            checkpoint=f"/c/{number}", weights="weights", model_sha256=f"sha{number}",
            created_at=NOW + timedelta(seconds=number),
        )  # fmt: skip
        async with self.db.begin() as c:
            await c.execute(insert_record(t.version, made))

    async def version_state(self, number: int, state: VersionState) -> None:
        v = t.version.c
        async with self.db.begin() as c:
            await c.execute(
                sa.update(t.version).where(v.version == number).values(state=state.value)
            )

    async def group(self, group: str = "grp_1", size: int = 1, **changes: Any) -> None:
        made = Group(group, TENANT, self.policy_id, "", size, GroupState.OPEN, NOW)
        async with self.db.begin() as c:
            await c.execute(insert_record(t.group, replace(made, **changes)))

    async def session(
        self,
        session: str = "",
        calls: Sequence[Interaction] = (),
        *,
        group: str = "",
        told: bool = False,
        **changes: Any,
    ) -> Session:
        """A session with its calls, in a group of its own unless one is named."""
        session = session or self.ses
        if not group:
            group = f"grp_{session}"
            await self.group(group)
        made = Session(
            session_id=session, tenant_id=TENANT, policy_id=self.policy_id, group_id=group, slot="",
            state=SessionState.OPEN, created_at=NOW,
        )  # fmt: skip
        made = replace(made, **changes)
        async with self.db.begin() as c:
            await c.execute(insert_record(t.session, made))
            for item in calls:
                await c.execute(insert_record(t.interaction, item))
            if told:
                await c.execute(
                    t.outbox.insert().values(
                        tenant_id=TENANT, policy_id=self.policy_id, session_id=session,
                        kind="session", ref=session, created_at=made.created_at,
                    )
                )  # fmt: skip
        return made

    async def reward(
        self,
        value: float | None,
        session: str = "",
        *,
        close_after: Any = None,
        **changes: Any,
    ) -> Reward:
        """A delivered reward, with its outbox entry."""
        count = len(await self.all(t.reward, Reward))
        made = reward(value, count + 1, session=session or self.ses, **changes)
        async with self.db.begin() as c:
            await put_reward(c, made, close_after)
        return made

    async def all(self, table: sa.Table, record: type[Any], *where: Any) -> list[Any]:
        async with self.db.connect() as c:
            query = sa.select(table).where(*where).order_by(*table.primary_key.columns)
            return await fetch_all(c, record, query)

    async def one_session(self, session: str = "") -> Session:
        (found,) = await self.all(
            t.session, Session, t.session.c.session_id == (session or self.ses)
        )
        return found

    async def samples(self, *where: Any) -> list[Sample]:
        return await self.all(t.sample, Sample, *where)

    async def group_state(self, group: str) -> str:
        (found,) = await self.all(t.group, Group, t.group.c.group_id == group)
        return str(found.state.value)

    async def returns(self) -> dict[tuple[str, int], float]:
        found = await self.all(t.returns, Return)
        return {(r.interaction_id, r.revision): r.value for r in found}

    async def versions(self) -> list[PolicyVersion]:
        return await self.all(t.version, PolicyVersion)

    async def manifests(self) -> list[Any]:
        async with self.db.connect() as c:
            return list(await c.execute(sa.select(t.manifest).order_by(t.manifest.c.created_at)))

    async def sealed_group(
        self, group: str, *versions: int, value: float = 1.0, members: int = 1, at: float = 0.0
    ) -> list[str]:
        """A ready group of sealed one-call sessions, their tokens sampled by ``versions``."""
        await self.group(group, members, created_at=NOW + timedelta(seconds=at))
        names = [f"{group}_s{n}" for n in range(members)]
        for name in names:
            ranges = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)]
            made = call(
                f"int_{name}", 1, (1, 2), range(7, 7 + len(versions)), session=name, versions=ranges
            )
            await self.session(name, [made], group=group)
            await self.reward(value, name)
            async with self.db.begin() as c:
                await settle(c, name, close=True, now=NOW + timedelta(hours=1))
        return names
