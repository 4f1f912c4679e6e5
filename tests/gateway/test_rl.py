"""Sessions, groups, rewards and ends over HTTP."""

from typing import Any

import pytest

from archon.records import random_id
from archon.storage import tables
from tests.gateway.kit import ADMIN, World
from tests.kit.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.stack

USER: Any = {"role": "user", "content": "hello"}


async def call(world: World, key: str) -> str:
    body = {"model": "m", "messages": [USER]}
    response = await world.post("/v1/chat/completions", key, body)
    assert response.status_code == 200, response.text
    interaction_id: str = response.json()["id"]
    return interaction_id


async def test_a_session_is_a_group_of_its_own(ready: World) -> None:
    started = await ready.start(task_id="t", labels={"a": "b"}, trainable=False)
    assert started["api_key"].startswith("sk-sess-")
    [session] = await ready.rows(tables.session)
    [group] = await ready.rows(tables.group)
    [key] = await ready.rows(tables.key)
    assert session["session_id"] == started["session_id"] and session["state"] == "open"
    assert session["slot"] == key["key_hash"] and key["scope"] == "session"
    assert started["api_key"] not in str(key)
    assert (session["task_id"], session["labels"], session["trainable"]) == ("t", {"a": "b"}, False)
    assert (group["group_id"], group["size"], group["state"]) == (started["group_id"], 1, "open")
    assert group["deadline"] is not None
    [entry] = await ready.rows(tables.outbox)
    assert (entry["kind"], entry["ref"], entry["sent_at"]) == (
        "session", started["session_id"], None,
    )  # fmt: skip


async def test_a_group_gives_n_sessions(ready: World) -> None:
    started = await ready.start(task_id="t", group_size=3)
    assert len(set(started["session_ids"])) == len(set(started["api_keys"])) == 3
    assert [s["session_api_key"] for s in started["sessions"]] == started["api_keys"]
    [group] = await ready.rows(tables.group)
    assert group["size"] == 3
    assert {s["group_id"] for s in await ready.rows(tables.session)} == {started["group_id"]}
    assert len(await ready.rows(tables.outbox)) == 3
    more = await ready.start(task_id="t", group_id=started["group_id"])
    assert more["group_id"] == started["group_id"] and len(more["session_ids"]) == 1
    [group] = await ready.rows(tables.group)
    assert group["size"] == 3


async def test_a_clients_group_name_is_its_tenants(ready: World) -> None:
    first = await ready.start(group_id="g1", group_size=2, count=1)
    second = await ready.start(group_id="g1", group_size=2)
    assert len(first["session_ids"]) == len(second["session_ids"]) == 1
    assert first["group_id"] == second["group_id"]
    await ready.policy(tenant_id=f"{ready.tenant}-b")
    response = await ready.post(
        "/rl/start_session", ADMIN, {"tenant": f"{ready.tenant}-b", "group_id": "g1"}
    )
    assert response.status_code == 200 and response.json()["group_id"] != first["group_id"]
    response = await ready.post(
        "/rl/start_session", ADMIN, {"tenant": f"{ready.tenant}-b", "group_id": first["group_id"]}
    )
    assert response.status_code == 404


async def test_an_id_made_before_is_kept(ready: World) -> None:
    group_id = random_id("grp")
    assert (await ready.start(group_id=group_id, group_size=2))["group_id"] == group_id


async def test_a_group_that_is_no_longer_open(ready: World) -> None:
    started = await ready.start(group_size=2)
    async with ready.database.begin() as c:
        await c.execute(
            tables.group.update()
            .where(tables.group.c.group_id == started["group_id"])
            .values(state="ready")
        )
    body = {"tenant": ready.tenant, "group_id": started["group_id"]}
    response = await ready.post("/rl/start_session", ADMIN, body)
    assert response.status_code == 409 and response.json()["error"]["param"] == "group_id"


async def test_a_reward_is_a_row_with_its_entry(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say("a"))
    started = await ready.start()
    interaction_id = await call(ready, started["api_key"])
    response = await ready.post("/rl/set_reward", started["api_key"], {"reward": 0.5})
    answer = response.json()
    assert answer["message"] == "success" and answer["interaction_count"] == 1
    assert answer["session_id"] == started["session_id"] and answer["duplicate"] is False
    body = {"value": 1, "interaction_id": interaction_id, "component": "c", "source": "s"}
    await ready.post("/v1/rl/set_reward", started["api_key"], body)
    first, second = sorted(await ready.rows(tables.reward), key=lambda r: r["seq"])
    assert (first["value"], first["interaction_id"], first["component"]) == (0.5, None, "")
    assert first["reward_id"] == answer["reward_id"] and first["seq"] == answer["seq"]
    assert (second["value"], second["interaction_id"]) == (1.0, interaction_id)
    assert (second["component"], second["source"]) == ("c", "s")
    entries = await ready.rows(tables.outbox, kind="reward")
    assert {e["ref"] for e in entries} == {first["reward_id"], second["reward_id"]}


@pytest.mark.parametrize("value", [0, 0.0, -1, "1", "0.5", True])
async def test_numbers_in_any_dress(ready: World, value: object) -> None:
    started = await ready.start()
    response = await ready.post("/rl/set_reward", started["api_key"], {"reward": value})
    assert response.status_code == 200
    assert [r["value"] for r in await ready.rows(tables.reward)] == [float(value)]  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [
    b'{"reward": NaN}', b'{"reward": "nan"}', b'{"reward": "inf"}', b'{"reward": 1e999}', b"{}",
    b'{"reward": null}', b'{"reward": [1]}', b'{"reward": "good"}', b"not json", b"[1]",
])  # fmt: skip
async def test_what_is_no_finite_number_is_refused(ready: World, body: bytes) -> None:
    started = await ready.start()
    response = await ready.http.post(
        "/rl/set_reward", content=body, headers={"x-api-key": started["api_key"]}
    )
    assert response.status_code in (400, 422) and response.json()["error"]["message"]
    assert await ready.rows(tables.reward) == []
    [session] = await ready.rows(tables.session)
    assert session["close_after"] is None


async def test_an_idempotency_key_removes_repeats_only(ready: World) -> None:
    key = (await ready.start())["api_key"]
    body = {"reward": 1.0, "idempotency_key": "k"}
    first = (await ready.post("/rl/set_reward", key, body)).json()
    again = (await ready.post("/rl/set_reward", key, body)).json()
    assert (again["reward_id"], again["seq"]) == (first["reward_id"], first["seq"])
    assert again["duplicate"] is True
    other = await ready.post("/rl/set_reward", key, {"reward": 2.0, "idempotency_key": "k"})
    assert other.status_code == 409 and other.json()["error"]["code"] == "idempotency_conflict"
    in_header = await ready.post(
        "/rl/set_reward", key, {"reward": 1.0}, headers={"idempotency-key": "k"}
    )
    assert in_header.json()["duplicate"] is True
    assert len(await ready.rows(tables.reward)) == 1
    assert len(await ready.rows(tables.outbox, kind="reward")) == 1
    await ready.post("/rl/set_reward", key, {"reward": 1.0})
    await ready.post("/rl/set_reward", key, {"reward": 1.0})
    assert len(await ready.rows(tables.reward)) == 3
    elsewhere = (await ready.start())["api_key"]
    assert (await ready.post("/rl/set_reward", elsewhere, body)).json()["duplicate"] is False


async def test_an_admin_key_names_the_session(ready: World) -> None:
    started = await ready.start()
    unnamed = await ready.post("/rl/set_reward", ADMIN, {"reward": 1})
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "session_id"
    body = {"reward": 1, "session_id": started["session_id"]}
    assert (await ready.post("/rl/set_reward", ADMIN, body)).status_code == 200
    body["session_id"] = "ses_none"
    assert (await ready.post("/rl/set_reward", ADMIN, body)).status_code == 404
    body = {"reward": 1, "session_id": started["session_id"], "interaction_id": "int_none"}
    assert (await ready.post("/rl/set_reward", ADMIN, body)).status_code == 404


async def test_a_session_tells_its_state(ready: World, engine: ScriptedEngine) -> None:
    engine.push(ready.say("a"))
    started = await ready.start(task_id="t")
    key = started["api_key"]
    await call(ready, key)
    await ready.post("/rl/set_reward", key, {"reward": 0.5})
    shown = (await ready.get(f"/rl/sessions/{started['session_id']}", key)).json()
    assert (shown["state"], shown["task_id"], shown["policy"]) == ("open", "t", "default")
    assert (shown["interactions"], shown["complete"]) == (1, 1)
    assert [reward["value"] for reward in shown["rewards"]] == [0.5]
    await ready.post("/rl/end_session", key, {"session_id": started["session_id"]})
    shown = (await ready.get(f"/rl/sessions/{started['session_id']}", ADMIN)).json()
    assert (shown["state"], shown["close_reason"]) == ("closed", "end")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", 0), ("group_size", "many"), ("labels", {"a": 1}), ("labels", ["a"]),
        ("trainable", "no"), ("deadline", "soon"), ("task_id", {"a": 1}), ("task_id", "a\0b"),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named(ready: World, field: str, value: object) -> None:
    body = {"tenant": ready.tenant, field: value}
    response = await ready.post("/rl/start_session", ADMIN, body)
    assert response.status_code == 422 and response.json()["error"]["param"] == field
    assert await ready.rows(tables.session) == []


async def test_keys_are_made_listed_and_revoked(ready: World, engine: ScriptedEngine) -> None:
    engine.default = ready.say("a")
    body = {"tenant": ready.tenant, "label": "laptop", "expires_in": 3600}
    made = (await ready.post("/rl/keys", ADMIN, body)).json()
    assert made["api_key"].startswith("sk-") and made["policy"] == "default"
    await call(ready, made["api_key"])
    listed = (await ready.get(f"/rl/keys?tenant={ready.tenant}", ADMIN)).json()["keys"]
    assert [(k["key_id"], k["label"]) for k in listed] == [(made["key_id"], "laptop")]
    assert made["api_key"] not in str(listed)
    path = f"/rl/keys/{made['key_id']}?tenant={ready.tenant}"
    headers = {"authorization": f"Bearer {ADMIN}"}
    assert (await ready.http.delete(path, headers=headers)).status_code == 200
    response = await ready.post(
        "/v1/chat/completions", made["api_key"], {"model": "m", "messages": [USER]}
    )
    assert response.status_code == 401
    listed = (await ready.get(f"/rl/keys?tenant={ready.tenant}", ADMIN)).json()["keys"]
    assert listed[0]["revoked_at"] is not None


async def test_a_key_revoked_by_another_process_is_dead_for_calls_at_once(
    ready: World, engine: ScriptedEngine
) -> None:
    engine.default = ready.say("a")
    key = (await ready.start())["api_key"]
    await call(ready, key)
    async with ready.database.begin() as c:
        await c.execute(
            tables.key.update()
            .where(tables.key.c.tenant_id == ready.tenant)
            .values(revoked_at=tables.key.c.created_at)
        )
    response = await ready.post("/v1/chat/completions", key, {"messages": [USER]})
    assert response.status_code == 401 and len(await ready.interactions()) == 1


async def test_an_expired_key(ready: World) -> None:
    started = await ready.start(expires_at="2020-01-01T00:00:00Z")
    response = await ready.post("/rl/set_reward", started["api_key"], {"reward": 1})
    assert response.status_code == 401


async def test_scopes(ready: World) -> None:
    session_key = (await ready.start())["api_key"]
    body = {"tenant": ready.tenant}
    tenant_key = (await ready.post("/rl/keys", ADMIN, body)).json()["api_key"]
    assert (await ready.post("/rl/start_session", session_key, {})).status_code == 403
    for key in (session_key, tenant_key):
        assert (await ready.post("/rl/keys", key, {})).status_code == 403
        assert (await ready.get("/rl/keys", key)).status_code == 403
    assert (await ready.post("/rl/start_session", tenant_key, {})).status_code == 200
    scope = {"tenant": ready.tenant, "scope": "admin"}
    own = (await ready.post("/rl/keys", ADMIN, scope)).json()["api_key"]
    made = await ready.post("/rl/keys", own, {})
    assert made.status_code == 200 and made.json()["tenant"] == ready.tenant
    assert (await ready.post("/rl/keys", own, {"tenant": "default"})).status_code == 404
