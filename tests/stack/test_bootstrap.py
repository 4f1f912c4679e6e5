"""The rows to begin with: written again and again, without undoing what was learned."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from archon.records import Policy, PolicySettings, Replica, loads
from archon.settings import Settings
from archon.stack.bootstrap import write_rows
from archon.stack.files import make_folder
from archon.stack.plan import ReplicaPlan, make_plan, make_secrets
from archon.storage import Database, tables
from archon.storage.rows import fetch_all, fetch_one

POLICIES = {"game": {"model": "/models/tiny", "batch_groups": 3}, "chat": {"model": "/models/b"}}


def plans(port: int) -> list[ReplicaPlan]:
    return [
        ReplicaPlan("rep_embedded_game_0", "game", f"http://127.0.0.1:{port}", "embedded", port),
        ReplicaPlan("rep_embedded_game_1", "game", "http://127.0.0.1:9001", "embedded", 9001),
    ]


async def replicas(database: Database) -> dict[str, Replica]:
    async with database.connect() as connection:
        rows = await fetch_all(connection, Replica, sa.select(tables.replica))
    return {row.replica_id: row for row in rows}


async def test_policies_follow_the_settings_and_keep_their_baseline(database: Database) -> None:
    write_rows(database.url, Settings(policies=POLICIES), [])
    async with database.begin() as connection:
        await connection.execute(sa.text("UPDATE policy SET baseline = 0.5, baseline_weight = 9"))
    changed = {"game": {"model": "/models/tiny", "batch_groups": 4}}
    write_rows(database.url, Settings(policies=changed), [])
    query = sa.select(tables.policy).where(tables.policy.c.policy_id == "game")
    async with database.connect() as connection:
        row = await fetch_one(connection, Policy, query)
        count = (await connection.execute(sa.text("SELECT count(*) FROM policy"))).scalar()
    assert row is not None
    assert loads(PolicySettings, row.settings) == PolicySettings("/models/tiny", batch_groups=4)
    assert (row.tenant_id, row.baseline, row.baseline_weight, count) == ("default", 0.5, 9.0, 2)


async def test_a_replica_keeps_what_it_was_proven_to_serve_until_it_moves(
    database: Database,
) -> None:
    settings = Settings(policies=POLICIES)
    write_rows(database.url, settings, plans(9000))
    async with database.begin() as connection:
        await connection.execute(sa.text("UPDATE replica SET version = 7, instance = 'abc'"))
    write_rows(database.url, settings, plans(9000))
    assert {r.version for r in (await replicas(database)).values()} == {7}
    write_rows(database.url, settings, plans(9002))
    found = await replicas(database)
    moved, stayed = found["rep_embedded_game_0"], found["rep_embedded_game_1"]
    assert (moved.url, moved.version, moved.instance) == ("http://127.0.0.1:9002", None, "")
    assert (stayed.version, stayed.instance) == (7, "abc")


async def test_replicas_that_are_not_wanted_any_more_go_and_other_tenants_stay(
    database: Database,
) -> None:
    write_rows(database.url, Settings(policies=POLICIES), plans(9000))
    other = Settings(tenant="acme", policies=POLICIES)
    write_rows(database.url, other, [ReplicaPlan("rep_acme", "game", "http://x", "external")])
    write_rows(database.url, Settings(policies=POLICIES), plans(9000)[:1])
    assert set(await replicas(database)) == {"rep_embedded_game_0", "rep_acme"}


def test_replicas_per_policy_and_engines_of_ones_own(tmp_path: Path) -> None:
    make_folder(tmp_path / "d" / "run", 0o755)
    free = {"port": 0, "ui_port": 0}
    settings = Settings(
        data_dir=tmp_path / "d", gateway={"port": 0}, temporal=free, policies=POLICIES,
        engine={"replicas": 2},
    )  # fmt: skip
    plan = make_plan(settings, {})
    assert [r.replica_id for r in plan.replicas] == [
        "rep_embedded_game_0", "rep_embedded_game_1",
        "rep_embedded_chat_0", "rep_embedded_chat_1",
    ]  # fmt: skip
    assert len({r.port for r in plan.replicas}) == 4
    assert make_plan(settings, {}).replicas == plan.replicas
    own = Settings(
        data_dir=tmp_path / "d", gateway={"port": 0}, temporal=free,
        policies={"game": POLICIES["game"]}, engine={"urls": ["http://gpu:8000/"]},
    )  # fmt: skip
    assert make_plan(own, {}).replicas == (
        ReplicaPlan("rep_own_game_0", "game", "http://gpu:8000", "external"),
    )


def test_secrets_are_made_once_and_an_admin_key_of_ones_own_replaces_them(
    tmp_path: Path,
) -> None:
    settings = Settings(data_dir=tmp_path)
    make_secrets(settings)
    first = {f.name: f.read_text() for f in settings.secrets_dir.iterdir()}
    assert set(first) == {"admin.key", "engine.token"}
    assert first["admin.key"].startswith("sk-admin-")
    make_secrets(settings)
    assert {f.name: f.read_text() for f in settings.secrets_dir.iterdir()} == first
    own = "sk-admin-" + "k" * 32
    make_secrets(Settings(data_dir=tmp_path, gateway={"admin_key": own}))
    file = settings.secrets_dir / "admin.key"
    assert file.read_text() == own + "\n"
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("url", ["mysql://x", "host:5432"])
def test_a_database_that_is_not_postgres_is_refused(url: str) -> None:
    from archon.stack.errors import StackError
    from archon.stack.plan import check

    with pytest.raises(StackError, match="must begin with postgresql://"):
        check(Settings(postgres={"url": url}))
