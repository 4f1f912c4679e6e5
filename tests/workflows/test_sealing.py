"""Sessions on a real database: closed, sealed, revised, and their groups made ready."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from archon.records import CloseReason, Interaction, SessionState
from archon.records.messages import Settled
from archon.storage import READY_CHANNEL, Listener
from archon.storage import tables as t
from archon.storage.sealing import UnknownSession, settle
from tests.kit.invariants import check_database
from tests.workflows.scene import NOW, Scene, call, chain

pytestmark = pytest.mark.stack


async def settled(
    scene: Scene, session: str = "ses_1", at: float = 2000.0, **options: Any
) -> Settled:
    async with scene.db.begin() as c:
        return await settle(c, session, now=NOW + timedelta(seconds=at), **options)


async def test_a_rewarded_session_is_closed_and_sealed_in_one_go(scene: Scene) -> None:
    await scene.policy(close_grace=2.0, gamma=0.5)
    await scene.session(calls=chain([7], [8, 9]))
    await scene.reward(1.0, close_after=NOW + timedelta(seconds=1002))
    result = await settled(scene, at=1002)
    assert (result.state, result.samples, result.revision, result.reward_seq) == ("sealed", 1, 1, 1)
    session = await scene.one_session()
    assert session.state == SessionState.SEALED
    assert (session.close_reason, session.sealed_reward_seq) == ("reward", 1)
    assert session.closed_at == session.sealed_at == NOW + timedelta(seconds=1002)
    assert await scene.returns() == {("int_ses_1_1", 1): 0.5, ("int_ses_1_2", 1): 1.0}
    (sample,) = await scene.samples()
    assert (sample.state, sample.n_trainable, sample.group_id) == ("free", 3, "grp_ses_1")
    assert await scene.group_state("grp_ses_1") == "ready"
    assert check_database(scene.db.url) == []


async def test_it_says_when_to_look_again(scene: Scene) -> None:
    await scene.policy(close_grace=2.0, idle_timeout=60.0, reward_timeout=100.0)
    await scene.session(calls=chain([7]), last_call_at=NOW + timedelta(seconds=10))
    assert await settled(scene, at=20) == Settled("open", wait=50.0)
    await scene.session("ses_2", close_after=NOW + timedelta(seconds=25))
    assert (await settled(scene, "ses_2", at=20)).wait == 5.0
    closed = await settled(scene, at=70)
    assert (closed.state, closed.wait) == ("closed", 100.0)
    session = await scene.one_session()
    assert (session.close_reason, session.closed_at) == ("idle", NOW + timedelta(seconds=70))
    assert (await settled(scene, at=110)).wait == 60.0


async def test_without_a_reward_in_time_it_is_unscored_and_never_0(scene: Scene) -> None:
    await scene.policy(reward_timeout=100.0)
    await scene.session(calls=chain([7]))
    assert (await settled(scene, at=0, close=True)).state == "closed"
    assert (await scene.one_session()).close_reason == CloseReason.END
    assert (await settled(scene, at=100)).state == "unscored"
    assert await scene.returns() == {} and await scene.samples() == []
    assert await scene.group_state("grp_ses_1") == "done", "nobody waits for it"


async def test_a_late_reward_seals_an_unscored_session_for_its_group(scene: Scene) -> None:
    await scene.policy(reward_timeout=0.0)
    await scene.group("g", size=2)
    await scene.session("ses_1", chain([7]), group="g")
    await scene.session("ses_2", group="g")
    assert (await settled(scene, close=True)).state == "unscored"
    await scene.reward(0.0)
    result = await settled(scene)
    assert (result.state, result.samples) == ("sealed", 1)
    assert await scene.returns() == {("int_ses_1_1", 1): 0.0}, "a reward of 0 is a reward"


async def test_a_session_without_a_call_is_empty_and_counted(scene: Scene) -> None:
    await scene.policy()
    await scene.session()
    await scene.reward(1.0)
    result = await settled(scene, close=True)
    assert (result.state, result.rewards, result.samples) == ("empty", 1, 0)
    assert await scene.group_state("grp_ses_1") == "done"
    assert await scene.samples() == [] and await scene.returns() == {}


async def test_a_new_reward_is_a_new_revision_and_no_reward_is_counted_twice(scene: Scene) -> None:
    await scene.policy(gamma=0.5)
    await scene.session(calls=chain([7], [8]))
    await scene.reward(1.0)
    assert (await settled(scene, close=True)).revision == 1
    assert (await settled(scene)).revision == 0, "nothing new"
    await scene.reward(0.5)
    result = await settled(scene)
    assert (result.revision, result.late, result.samples) == (2, False, 0)
    assert await scene.returns() == {
        ("int_ses_1_1", 1): 0.5, ("int_ses_1_2", 1): 1.0,
        ("int_ses_1_1", 2): 0.25, ("int_ses_1_2", 2): 0.5,
    }  # fmt: skip
    assert len(await scene.samples()) == 1
    assert (await scene.one_session()).sealed_reward_seq == 2


async def test_a_rejected_reward_changes_nothing(scene: Scene) -> None:
    await scene.policy()
    await scene.session(calls=chain([7]))
    await scene.reward(1.0)
    await settled(scene, close=True)
    await scene.reward(None, rejected="not a number", raw='"good"')
    result = await settled(scene)
    assert (result.revision, result.rewards, result.rejected) == (0, 1, 1)


async def test_a_reward_after_training_is_recorded_and_reported(scene: Scene) -> None:
    await scene.policy()
    await scene.session(calls=chain([7]))
    await scene.reward(1.0)
    await settled(scene, close=True)
    async with scene.db.begin() as c:
        await c.execute(t.sample.update().values(state="trained", manifest_id="man_1"))
        await c.execute(t.group.update().values(state="done"))
    await scene.reward(0.0)
    result = await settled(scene)
    assert (result.revision, result.late, result.samples) == (2, True, 0)
    assert len(await scene.samples()) == 1, "it is not trained again"


async def test_a_lower_reward_that_commits_later_is_not_overlooked(scene: Scene) -> None:
    await scene.policy()
    await scene.session(calls=chain([7]))
    async with scene.db.connect() as slow:
        number = await slow.exec_driver_sql(
            "SELECT nextval(pg_get_serial_sequence('reward','seq'))"
        )
        low = number.scalar_one()
    await scene.reward(1.0)
    await settled(scene, close=True)
    async with scene.db.begin() as c:
        await c.exec_driver_sql(
            "INSERT INTO reward (seq, reward_id, session_id, tenant_id, policy_id, component,"
            " source, created_at, value, rejected, raw) OVERRIDING SYSTEM VALUE"
            f" VALUES ({low}, 'rew_low', 'ses_1', 'acme', 'game', 'style', '', now(), 0.25, '', '')"
        )
    result = await settled(scene)
    assert (result.revision, (await scene.returns())["int_ses_1_1", 2]) == (2, 1.25)


async def test_a_group_is_ready_when_its_last_member_is_done(scene: Scene) -> None:
    await scene.policy(reward_timeout=0.0)
    await scene.group("g", size=3)
    for n in (1, 2, 3):
        await scene.session(f"ses_{n}", chain([n], session=f"ses_{n}"), group="g")
    await scene.reward(1.0, "ses_1")
    await settled(scene, "ses_1", close=True)
    await settled(scene, "ses_2", close=True)  # unscored
    assert await scene.group_state("g") == "open"
    await scene.reward(0.0, "ses_3")
    async with Listener(scene.db.url, READY_CHANNEL) as listener:
        await settled(scene, "ses_3", close=True)
        assert await listener.wait(5) == ["acme/game"]
    assert await scene.group_state("g") == "ready"
    assert [s.session_id for s in await scene.samples()].count("ses_2") == 0


async def test_a_replaced_member_is_not_waited_for(scene: Scene) -> None:
    await scene.policy()
    await scene.group("g", size=2)
    for n in (1, 2, 3):
        await scene.session(f"ses_{n}", chain([n], session=f"ses_{n}"), group="g")
        await scene.reward(1.0, f"ses_{n}")
    await settled(scene, "ses_1", close=True)
    await settled(scene, "ses_3", close=True)
    assert await scene.group_state("g") == "ready", "as many as were planned"
    await settled(scene, "ses_2", close=True)
    assert len(await scene.samples(t.sample.c.state == "free")) == 3


async def test_who_comes_after_the_group_was_claimed_is_dropped_and_counted(scene: Scene) -> None:
    await scene.policy()
    await scene.group("g", size=2, state="claimed")
    await scene.session("ses_1", chain([7]), group="g")
    await scene.reward(1.0)
    assert (await settled(scene, close=True)).samples == 0
    (sample,) = await scene.samples()
    assert (sample.state, sample.drop_reason) == ("dropped", "late_for_group")


async def test_members_that_finish_at_once_still_make_their_group_ready(scene: Scene) -> None:
    await scene.policy()
    await scene.group("g", size=6)
    for n in range(6):
        await scene.session(f"ses_{n}", chain([n], session=f"ses_{n}"), group="g")
        await scene.reward(1.0, f"ses_{n}")
    await asyncio.gather(*(settled(scene, f"ses_{n}", close=True) for n in range(6)))
    assert await scene.group_state("g") == "ready"


async def test_an_evaluation_is_scored_and_not_trained(scene: Scene) -> None:
    await scene.policy()
    await scene.session(calls=chain([7]), trainable=False)
    await scene.reward(1.0)
    assert (await settled(scene, close=True)).state == "sealed"
    assert await scene.samples() == []
    assert await scene.returns() == {("int_ses_1_1", 1): 1.0}
    assert await scene.group_state("grp_ses_1") == "done"


async def test_what_was_found_about_the_calls_is_written_down(scene: Scene) -> None:
    await scene.policy()
    first = call("first", 1, request_digest="same")
    again = call("again", 2, request_digest="same")
    broken = call("broken", 3, previous="again", prompt_sha256="0" * 64, evidence_gaps=["x"])
    await scene.session(calls=[first, again, broken])
    await scene.reward(1.0)
    await settled(scene, close=True)
    found = {i.interaction_id: i for i in await scene.all(t.interaction, Interaction)}
    assert found["first"].status == "superseded"
    assert found["broken"].evidence_gaps == ["x", "prompt_sha256"]
    assert found["broken"].status == "complete"
    assert await scene.returns() == {("again", 1): 1.0, ("broken", 1): 1.0}
    assert [s.interactions for s in await scene.samples()] == [["again"]]


async def test_a_reward_for_a_call_that_takes_no_part_does_not_score_the_session(
    scene: Scene,
) -> None:
    await scene.policy(reward_timeout=50.0)
    side = call("side", 1, status="side_call")
    await scene.session(calls=[side, call("main", 2)])
    await scene.reward(1.0, interaction="side")
    assert (await settled(scene, at=10, close=True)).state == "closed"
    assert (await settled(scene, at=60)).state == "unscored"


async def test_a_prefix_from_the_slots_earlier_session_is_found(scene: Scene) -> None:
    await scene.policy()
    before = call("before", 1, (1, 2), (7,), session="ses_0")
    await scene.session("ses_0", [before])
    await scene.session(calls=[call("now", 1, (3,), (8,), parent=before)])
    await scene.reward(1.0)
    await settled(scene, close=True)
    (sample,) = await scene.samples()
    assert (sample.n_tokens, sample.n_trainable, sample.interactions) == (5, 1, ["now"])
    assert check_database(scene.db.url) == []


async def test_settling_at_the_same_time_writes_one_revision(scene: Scene) -> None:
    await scene.policy()
    await scene.session(calls=chain([7]))
    await scene.reward(1.0)
    results = await asyncio.gather(*(settled(scene, close=True) for _ in range(4)))
    assert sorted(r.revision for r in results) == [0, 0, 0, 1]
    assert len(await scene.samples()) == 1


async def test_an_unknown_session_is_an_error_with_its_name(scene: Scene) -> None:
    with pytest.raises(UnknownSession, match="ses_9"):
        await settled(scene, "ses_9")
