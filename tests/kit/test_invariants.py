"""The checker finds nothing in a healthy history, and names the invariant of every injury."""

from pathlib import Path

import psycopg
import pytest

from archon.storage import Database, lake
from tests.kit.history import NOW, write_history
from tests.kit.invariants import Acknowledged, check_checkpoints, check_database, check_lake

pytestmark = pytest.mark.stack

INJURIES = [
    (1, "UPDATE sample SET state = 'free'"),
    (1, "UPDATE sample SET state = 'dropped', manifest_id = NULL"),
    (1, "UPDATE batch_manifest SET state = 'dropped'"),
    (1, "INSERT INTO batch_manifest SELECT 'man_2', tenant_id, policy_id, base_version, state, "
        "body, digest, reason, metrics, created_at, ended_at FROM batch_manifest"),
    (1, "UPDATE interaction SET support = '\\x0100' WHERE interaction_id = 'int_2'"),
    (2, "UPDATE interaction SET logprobs = logprobs || '\\x00000000' WHERE seq = 1"),
    (2, "UPDATE interaction SET versions = '[]' WHERE seq = 2"),
    (2, "UPDATE interaction SET prompt_ids = '\\x04000000' WHERE seq = 2"),
    (2, "UPDATE interaction SET output_ids = '\\x06000000' WHERE seq = 1"),
    (2, "UPDATE interaction SET logprobs = '\\x00000000' WHERE seq = 1"),
    (2, "UPDATE sample SET mask = '\\x000001010101'"),
    (3, "UPDATE sample SET versions = decode('ffffffffffffffff63000000ffffffff0000000000000000',"
        " 'hex')"),
    (5, "UPDATE policy_version SET manifest_id = NULL"),
    (5, "UPDATE policy_version SET state = 'retired'"),
    (5, "UPDATE policy_version SET parent = 9 WHERE version = 1"),
    (5, "UPDATE policy_version SET created_at = '2020-01-01' WHERE version = 1"),
    (8, "UPDATE batch_manifest SET body = replace(body, '\"seed\":1', '\"seed\":2')"),
    (8, "UPDATE interaction_return SET value = 0.5"),
    (9, "UPDATE reward SET tenant_id = 'other'"),
]  # fmt: skip


async def test_a_healthy_history_breaks_nothing(database: Database, database_url: str) -> None:
    await write_history(database)
    kept = Acknowledged({"int_1", "int_2"}, {"rew_1": 1.0})
    assert check_database(database_url, kept) == []


@pytest.mark.parametrize(("invariant", "injury"), INJURIES)
async def test_each_injury_is_named(
    database: Database, database_url: str, invariant: int, injury: str
) -> None:
    await write_history(database)
    with psycopg.connect(database_url) as connection:
        connection.execute(injury)
    found = check_database(database_url)
    assert invariant in {violation.invariant for violation in found}, found


async def test_what_was_acknowledged_must_be_there(database: Database, database_url: str) -> None:
    await write_history(database)
    lost = Acknowledged({"int_3"}, {"rew_1": 0.5, "rew_2": 1.0})
    where = {violation.where for violation in check_database(database_url, lost)}
    assert where == {"int_3", "rew_1", "rew_2"}


async def test_a_checkpoint_must_be_whole(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    await write_history(database)
    assert [v.where for v in check_checkpoints(database_url)] == ["p v1", "p v0"]
    weights = tmp_path / "a" / "weights"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(b"")
    (tmp_path / "checkpoint.json").write_text("{}")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "UPDATE policy_version SET checkpoint = %s, model_sha256 = %s", (str(tmp_path), empty)
        )
    assert check_checkpoints(database_url) == []
    (weights / "model.safetensors").write_bytes(b"torn")
    assert [v.invariant for v in check_checkpoints(database_url)] == [8, 8]


async def test_a_compacted_session_must_lie_in_its_file(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    await write_history(database)
    async with database.begin() as c:
        batch = await lake.next_batch(c, 10)
        assert batch is not None and batch.sessions == ["ses_1"]
        content = await lake.read_tables(c, batch)
        await lake.record(c, batch, NOW)
    assert [v.invariant for v in check_lake(database_url, str(tmp_path))] == [5]
    files = lake.Lake(str(tmp_path))
    files.write_aside(batch, content)
    assert check_lake(database_url, str(tmp_path)) == []
    files.publish(batch.file)
    assert check_lake(database_url, str(tmp_path)) == []
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE interaction SET output_ids = '' WHERE interaction_id = 'int_1'")
    assert [v.where for v in check_lake(database_url, str(tmp_path))] == ["int_1"]
