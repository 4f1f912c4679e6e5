"""Admission: the golden values, and what counts as outstanding."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.testing import ActivityEnvironment

from activities.admission import AdmissionActivities
from archon.records import GroupState, SampleState, Session, SessionState, VersionState
from archon.records import system_clock as now
from archon.records.messages import GroupPlan, LostMembers
from archon.storage import READY_CHANNEL, Database, groups, notify
from archon.storage import tables as t
from archon.storage.groups import capacity
from archon.storage.rows import insert_record
from archon.storage.sealing_rows import finish_group
from tests.rollout.history import (
    POLICY,
    TENANT,
    add_group,
    add_policy,
    add_sample,
    add_version,
    sample,
)

stack = pytest.mark.stack


def test_after_a_restore_at_version_10_there_is_room_for_two_batches_of_four() -> None:
    assert capacity(max_staleness=1, batch=4, accepted=10 * 4, version=10) == 8


@pytest.mark.parametrize(("accepted", "room"), [(40, 8), (44, 4), (47, 1), (48, 0), (49, -1)])
def test_what_is_accepted_takes_room_and_a_version_gives_a_batch_back(
    accepted: int, room: int
) -> None:
    assert capacity(1, 4, accepted, 10) == room
    assert capacity(1, 4, accepted, 11) == room + 4


def plan(name: str) -> GroupPlan:
    return GroupPlan(TENANT, POLICY, f"grp_{name}", "task", 8)


async def admit(db: Database, name: str) -> bool:
    async with db.begin() as c:
        return await groups.admit(c, plan(name), now())


async def set_group(db: Database, name: str, **changes: object) -> None:
    async with db.begin() as c:
        await c.execute(
            sa.update(t.group).where(t.group.c.group_id == f"grp_{name}").values(**changes)
        )


async def set_version(db: Database, version: int, state: VersionState) -> None:
    async with db.begin() as c:
        await c.execute(
            sa.update(t.version).where(t.version.c.version == version).values(state=state.value)
        )


@stack
async def test_groups_start_until_the_bound_and_again_when_a_step_is_live(
    database: Database, tmp_path: Path
) -> None:
    """Batch 2 and max_staleness 1: four groups may be outstanding."""
    await add_policy(database, batch_groups=2, max_staleness=1, max_ahead=1)
    await add_version(database, tmp_path, 0, VersionState.LIVE)
    assert [await admit(database, n) for n in "abcde"] == [True, True, True, True, False]
    assert await admit(database, "a"), "asking again for a group that is open costs nothing"
    await set_group(database, "a", state="ready")
    await set_group(database, "b", state="claimed")
    assert not await admit(database, "e")
    # Trained, but not yet live: agents would still sample with the old weights.
    await set_group(database, "a", state="done")
    await set_group(database, "b", state="done")
    await add_version(database, tmp_path, 1, VersionState.TRAINED)
    assert not await admit(database, "e")
    await set_version(database, 0, VersionState.RETIRED)
    await set_version(database, 1, VersionState.LIVE)
    assert [await admit(database, n) for n in "efg"] == [True, True, False]
    # One whose deadline has passed is not waited for.
    await set_group(database, "c", deadline=now() - timedelta(seconds=1))
    assert [await admit(database, n) for n in "gh"] == [True, False]


@stack
async def test_sessions_of_ordinary_use_take_room_only_when_they_are_ready(
    database: Database, tmp_path: Path
) -> None:
    await add_policy(database, batch_groups=1, max_staleness=0, max_ahead=0)
    await add_version(database, tmp_path, 0, VersionState.LIVE)
    await add_group(database, "grp_chat", GroupState.OPEN, size=1, task_id="")
    assert await admit(database, "a")
    await set_group(database, "a", state="done")
    await set_group(database, "chat", state="ready")
    assert not await admit(database, "b")


@stack
async def test_without_admission_any_number_may_start(database: Database, tmp_path: Path) -> None:
    await add_policy(database, batch_groups=1, max_staleness=0, max_ahead=0, admission=False)
    await add_version(database, tmp_path, 0, VersionState.LIVE)
    assert [await admit(database, n) for n in "abc"] == [True] * 3


@stack
async def test_whoever_waits_is_let_in_in_turn_as_soon_as_there_is_room(
    database: Database, tmp_path: Path
) -> None:
    await add_policy(database, batch_groups=1, max_staleness=0, max_ahead=0)
    await add_version(database, tmp_path, 0, VersionState.LIVE)
    activities = AdmissionActivities(database)
    admitted: list[str] = []

    async def wait(name: str) -> None:
        await ActivityEnvironment().run(activities.admit_group, plan(name))
        admitted.append(name)

    await wait("a")
    waiting = []
    for name in "bc":
        waiting.append(asyncio.create_task(wait(name)))
        await asyncio.sleep(0.2)
    assert admitted == ["a"]
    for done, expected in (("a", ["a", "b"]), ("b", ["a", "b", "c"])):
        async with database.begin() as c:
            await c.execute(
                sa.update(t.group).where(t.group.c.group_id == f"grp_{done}").values(state="done")
            )
            await notify(c, READY_CHANNEL, f"{TENANT}/{POLICY}")
        async with asyncio.timeout(2):
            while admitted != expected:
                await asyncio.sleep(0.01)
    await asyncio.gather(*waiting)


async def add_session(db: Database, name: str, member: int, wave: int, state: SessionState) -> None:
    row = Session(
        session_id=f"ses_{name}",
        tenant_id=TENANT,
        policy_id=POLICY,
        group_id="grp_a",
        slot=f"slot-{name}",
        state=state,
        created_at=now(),
        labels={"member": str(member), "wave": str(wave)},
    )
    async with db.begin() as c:
        await c.execute(insert_record(t.session, row))


async def group_state(db: Database) -> tuple[str, int]:
    async with db.connect() as c:
        found = await groups.get_group(c, "grp_a")
    assert found is not None
    return found.state.value, found.size


@stack
async def test_a_lost_member_leaves_its_group_and_its_samples_are_counted(
    database: Database,
) -> None:
    await add_policy(database)
    await add_group(database, "grp_a", GroupState.OPEN, size=2)
    await add_session(database, "lost", 0, 0, SessionState.OPEN)
    await add_session(database, "late", 0, 0, SessionState.SEALED)
    await add_sample(database, "late", [-1, 0])
    await add_session(database, "other", 1, 0, SessionState.OPEN)
    async with database.begin() as c:
        assert await groups.lose_members(c, LostMembers("grp_a", 0, [0]), now()) == 2
    async with database.connect() as c:
        rows = await c.execute(
            sa.select(t.session.c.session_id, t.session.c.state, t.session.c.trainable)
        )
        assert {tuple(row) for row in rows} == {
            ("ses_lost", "closed", False),
            ("ses_late", "sealed", False),
            ("ses_other", "open", True),
        }
        entries = await c.execute(sa.select(t.outbox.c.session_id, t.outbox.c.kind))
        assert [tuple(row) for row in entries] == [("ses_lost", "close")]
    dropped = await sample(database, "late")
    assert (dropped.state, dropped.drop_reason) == (SampleState.DROPPED, "lost_member")
    async with database.connect() as c:
        reasons = await c.execute(sa.select(t.session.c.session_id, t.session.c.close_reason))
        assert {row[0]: row[1] for row in reasons} == {
            "ses_lost": "lost", "ses_late": "lost", "ses_other": "",
        }  # fmt: skip


@stack
async def test_a_group_waits_for_the_replacement_of_a_lost_member(database: Database) -> None:
    await add_policy(database)
    await add_group(database, "grp_a", GroupState.OPEN, size=2)
    await add_session(database, "good", 0, 0, SessionState.SEALED)
    await add_sample(database, "good", [-1, 0])
    await add_session(database, "lost", 1, 0, SessionState.OPEN)
    async with database.begin() as c:
        await groups.lose_members(c, LostMembers("grp_a", 0, [1]), now())
        await finish(c)
    assert await group_state(database) == ("open", 2)
    await add_session(database, "next", 1, 1, SessionState.SEALED)
    async with database.begin() as c:
        await finish(c)
    assert await group_state(database) == ("ready", 2)


async def finish(c: AsyncConnection) -> None:
    group = await groups.get_group(c, "grp_a")
    assert group is not None
    await finish_group(c, group)


@stack
async def test_a_group_that_cannot_be_whole_is_ready_with_what_it_has(database: Database) -> None:
    await add_policy(database)
    await add_group(database, "grp_a", GroupState.OPEN, size=2)
    await add_session(database, "good", 0, 0, SessionState.SEALED)
    await add_sample(database, "good", [-1, 0])
    await add_session(database, "lost", 1, 0, SessionState.OPEN)
    async with database.begin() as c:
        await groups.lose_members(c, LostMembers("grp_a", 0, [1]), now())
        await groups.shrink(c, "grp_a", 1)
    assert await group_state(database) == ("ready", 1)


@stack
async def test_a_group_that_lost_everybody_is_over(database: Database) -> None:
    await add_policy(database)
    await add_group(database, "grp_a", GroupState.OPEN, size=2)
    async with database.begin() as c:
        await groups.shrink(c, "grp_a", 0)
    assert await group_state(database) == ("done", 2)
