"""Rows of a policy with versions, checkpoints and samples, as earlier rooms would leave them."""

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from archon.records import (
    Group,
    GroupState,
    Policy,
    PolicySettings,
    PolicyVersion,
    Replica,
    Sample,
    SampleState,
    VersionState,
    system_clock,
)
from archon.records.wire import dumps
from archon.settings import Settings
from archon.storage import Database, replicas
from archon.storage import tables as t
from archon.storage.rows import as_record, insert_record

TENANT, POLICY = "default", "game"
PROBE_IDS = [1, 2, 3, 4]


def probe_of(version: int) -> list[float]:
    """What the trainer says of version v: −1 − v/10 for each of the three predictable tokens."""
    return [-1.0 - version / 10] * 3


def true_probe(ids: Sequence[int], version: int) -> list[float]:
    """An engine that serves what it was given."""
    return probe_of(version)


def settings_in(folder: Path, prefix: str = "test", **changes: Any) -> Settings:
    changes = {"temporal": {"queue_prefix": prefix}, **changes}
    return Settings(data_dir=folder, **changes)


async def add_policy(db: Database, **changes: Any) -> PolicySettings:
    settings = PolicySettings(**{"model": "model", "batch_groups": 2, **changes})
    row = Policy(TENANT, POLICY, json.loads(dumps(settings)), system_clock())
    async with db.begin() as c:
        await c.execute(insert_record(t.policy, row))
    return settings


async def add_version(
    db: Database,
    folder: Path,
    number: int,
    state: VersionState,
    parent: int | None = None,
    live_before: bool = False,
) -> PolicyVersion:
    checkpoint = folder / f"v{number}"
    checkpoint.mkdir()
    made = {
        "attempt": "a1",
        "weights": "a1/weights",
        "model_sha256": f"sha{number}",
        "probe": {"token_ids": PROBE_IDS, "logprobs": probe_of(number)},
    }
    (checkpoint / "checkpoint.json").write_text(json.dumps(made))
    now = system_clock()
    version = PolicyVersion(
        tenant_id=TENANT,
        policy_id=POLICY,
        version=number,
        parent=number - 1 if parent is None and number else parent,
        state=state,
        checkpoint=str(checkpoint),
        weights="a1/weights",
        model_sha256=f"sha{number}",
        created_at=now,
        manifest_id=None if number == 0 else f"man_{number}",
        live_at=now if state == VersionState.LIVE or live_before else None,
    )
    async with db.begin() as c:
        await c.execute(insert_record(t.version, version))
    return version


async def add_replica(db: Database, name: str, url: str) -> None:
    async with db.begin() as c:
        row = Replica(name, TENANT, POLICY, url, "embedded", system_clock())
        await c.execute(insert_record(t.replica, row))


async def replica(db: Database, name: str) -> Replica:
    async with db.connect() as c:
        found = await replicas.get_replica(c, name)
    assert found is not None
    return found


async def states(db: Database) -> dict[int, str]:
    async with db.connect() as c:
        rows = await c.execute(sa.select(t.version.c.version, t.version.c.state))
        return {row.version: row.state for row in rows}


async def add_group(
    db: Database, name: str, state: GroupState, size: int = 2, task_id: str = "task"
) -> None:
    now = system_clock()
    row = Group(name, TENANT, POLICY, task_id, size, state, now, now + timedelta(hours=1))
    async with db.begin() as c:
        await c.execute(insert_record(t.group, row))


async def add_sample(
    db: Database,
    name: str,
    versions: Sequence[int],
    mask: Sequence[int] | None = None,
    state: SampleState = SampleState.FREE,
    group: str = "grp_a",
    manifest_id: str | None = None,
) -> Sample:
    """A sample whose tokens were sampled by ``versions``, −1 for a prompt's."""
    mask = [int(v >= 0) for v in versions] if mask is None else mask
    trained = [v for v, m in zip(versions, mask, strict=True) if m]
    n = len(versions)
    row = Sample(
        sample_id=name,
        session_id=f"ses_{name}",
        group_id=group,
        tenant_id=TENANT,
        policy_id=POLICY,
        state=state,
        interactions=[f"int_{name}"],
        n_tokens=n,
        n_trainable=sum(mask),
        min_version=min(trained),
        max_version=max(trained),
        tokens=np.arange(n, dtype="<i4").tobytes(),
        mask=np.array(mask, "u1").tobytes(),
        logprobs=np.full(n, -0.5, "<f4").tobytes(),
        versions=np.array(versions, "<i4").tobytes(),
        interaction=np.where(np.array(versions) >= 0, 0, -1).astype("<i4").tobytes(),
        digest=f"digest-{name}",
        created_at=system_clock(),
        manifest_id=manifest_id,
    )
    async with db.begin() as c:
        await c.execute(insert_record(t.sample, row))
    return row


async def sample(db: Database, name: str) -> Sample:
    async with db.connect() as c:
        row = (await c.execute(sa.select(t.sample).where(t.sample.c.sample_id == name))).one()
    return as_record(Sample, row)
