"""Two tenants with two policies each: nobody reaches what is another's, by any route."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from archon.storage import tables
from tests.gateway.kit import ADMIN, ENGINE_TOKEN, World
from tests.kit.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.stack

USER: Any = {"role": "user", "content": "hello"}
CHAT: Any = {"model": "default", "messages": [USER]}
POLICIES = ("red", "blue")


@dataclasses.dataclass
class Corner:
    """One policy of one tenant, with a key of its own and a session that was played in."""

    world: World
    policy: str
    engine: ScriptedEngine
    tenant_key: str = ""
    session_key: str = ""
    session: str = ""
    interaction: str = ""


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ScriptedEngine(version=i, token=ENGINE_TOKEN)) for i in range(4)]


@pytest.fixture
async def corners(world: World, engines: list[ScriptedEngine]) -> list[Corner]:
    made = []
    for at, engine in enumerate(engines):
        tenant = dataclasses.replace(world, tenant=f"{world.tenant}-{at // 2}")
        corner = Corner(tenant, POLICIES[at % 2], engine)
        engine.default = world.say(f"I am {at}")
        await tenant.policy(corner.policy)
        await tenant.replica(engine, corner.policy)
        made.append(corner)
    for corner in made:
        body = {"tenant": corner.world.tenant, "policy": corner.policy}
        corner.tenant_key = (await world.post("/rl/keys", ADMIN, body)).json()["api_key"]
        started = await world.post("/rl/start_session", corner.tenant_key, {})
        assert started.status_code == 200 and started.json()["policy"] == corner.policy
        corner.session, corner.session_key = started.json()["session_id"], started.json()["api_key"]
        answer = await world.post("/v1/chat/completions", corner.session_key, CHAT)
        corner.interaction = answer.json()["id"]
    return made


async def test_every_call_is_served_by_its_own_policys_replica(corners: list[Corner]) -> None:
    for at, corner in enumerate(corners):
        for key in (corner.session_key, corner.tenant_key):
            answer = await corner.world.post("/v1/chat/completions", key, CHAT)
            assert answer.json()["choices"][0]["message"]["content"] == f"I am {at}"
        listed = (await corner.world.get("/v1/models", corner.tenant_key)).json()["data"]
        assert [model["id"] for model in listed] == [corner.policy]
        rows = [r for r in await corner.world.interactions() if r.policy_id == corner.policy]
        assert len(rows) == 3
        assert {row.versions[0]["version"] for row in rows} == {at}


async def test_no_key_reaches_another_corner(corners: list[Corner]) -> None:
    for mine in corners:
        for other in corners:
            if other is mine:
                continue
            for key in (mine.tenant_key, mine.session_key):
                await refused_everywhere(mine.world, key, other)
    for corner in corners:
        assert len(await corner.world.rows(tables.reward)) == 0
        assert len(await corner.world.interactions(corner.session)) == 1
        [session] = await corner.world.rows(tables.session, session_id=corner.session)
        assert session["state"] == "open" and session["close_after"] is None


async def refused_everywhere(world: World, key: str, other: Corner) -> None:
    for path in ("", "/v1", "/v1/v1"):
        answer = await world.post(f"/s/{other.session}{path}/chat/completions", key, CHAT)
        assert answer.status_code == 404, answer.text
    assert (await world.get(f"/s/{other.session}/v1/models", key)).status_code == 404
    for header in ("x-archon-session", "x-session-id"):
        answer = await world.post(
            "/v1/chat/completions", key, CHAT, headers={header: other.session}
        )
        assert answer.status_code == 404, (header, answer.text)
    assert (await world.get(f"/rl/sessions/{other.session}", key)).status_code == 404
    for name, value in (("session_id", other.session), ("interaction_id", other.interaction)):
        answer = await world.post("/rl/set_reward", key, {"reward": 1, name: value})
        assert answer.status_code == 404, answer.text
    answer = await world.post("/rl/end_session", key, {"session_id": other.session})
    assert answer.status_code == 404, answer.text


async def test_a_tenant_key_starts_in_its_own_corner_only(corners: list[Corner]) -> None:
    mine, sibling, stranger, _ = corners
    for body in (
        {"tenant": stranger.world.tenant},
        {"policy": sibling.policy},
        {"api_key": sibling.session_key},
        {"api_key": stranger.session_key},
    ):
        answer = await mine.world.post("/rl/start_session", mine.tenant_key, body)
        assert answer.status_code == 404, (body, answer.text)


async def test_a_tenants_admin_stays_in_its_tenant(corners: list[Corner]) -> None:
    mine, sibling, stranger, _ = corners
    body = {"tenant": mine.world.tenant, "scope": "admin"}
    key = (await mine.world.post("/rl/keys", ADMIN, body)).json()["api_key"]
    assert (await mine.world.get(f"/rl/sessions/{sibling.session}", key)).status_code == 200
    await refused_everywhere(mine.world, key, stranger)
    assert (
        await mine.world.get(f"/rl/keys?tenant={stranger.world.tenant}", key)
    ).status_code == 404
    [victim] = [
        k
        for k in await stranger.world.rows(tables.key)
        if k["scope"] == "tenant" and k["policy_id"] == stranger.policy
    ]
    gone = await mine.world.http.delete(
        f"/rl/keys/{victim['key_hash']}", headers={"x-api-key": key}
    )
    assert gone.status_code == 404
    [victim] = await stranger.world.rows(tables.key, key_hash=victim["key_hash"])
    assert victim["revoked_at"] is None


async def test_an_admin_says_which_policy(corners: list[Corner]) -> None:
    world = corners[0].world
    answer = await world.post("/rl/start_session", ADMIN, {"tenant": world.tenant})
    assert answer.status_code == 400 and "red, blue" in answer.json()["error"]["message"]
    for named in ({"policy": "blue"}, {"model": "blue"}):
        answer = await world.post("/rl/start_session", ADMIN, {"tenant": world.tenant, **named})
        assert answer.json()["policy"] == "blue"
    answer = await world.post(
        "/rl/start_session", ADMIN, {"tenant": world.tenant, "policy": "green"}
    )
    assert answer.status_code == 404
