"""The lake: every sealed session once, whatever dies between which two steps."""

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import sqlalchemy as sa

from activities.lake import compact
from archon.records import (
    Interaction,
    InteractionStatus,
    Session,
    SessionState,
    system_clock,
)
from archon.storage import Database, lake
from archon.storage import tables as t
from archon.storage.rows import insert_record
from tests.rollout.history import POLICY, TENANT, add_sample

pytestmark = pytest.mark.stack
SEALED = SessionState.SEALED


class Died(Exception):
    """The process, where a test says so."""


async def add_session(
    db: Database, name: str, state: SessionState, policy: str = POLICY, at: int = 0
) -> None:
    now = system_clock()
    sealed_at = now + timedelta(seconds=at) if state == SEALED else None
    session = Session(
        f"ses_{name}", TENANT, policy, f"grp_{name}", name, state, now, sealed_at=sealed_at
    )
    async with db.begin() as c:
        await c.execute(insert_record(t.session, session))
        for seq in range(2):
            await c.execute(insert_record(t.interaction, interaction(name, policy, seq, now)))
    if state == SEALED:
        await add_sample(db, name, [-1, 0, 0])


def interaction(name: str, policy: str, seq: int, now: datetime) -> Interaction:
    return Interaction(
        interaction_id=f"int_{name}_{seq}",
        session_id=f"ses_{name}",
        tenant_id=TENANT,
        policy_id=policy,
        seq=seq,
        status=InteractionStatus.COMPLETE,
        protocol="openai",
        request_digest="r",
        messages_digest="m",
        prompt_ids=b"\x01\0\0\0",
        prompt_length=1,
        prompt_sha256="p",
        output_ids=b"\x02\0\0\0",
        logprobs=b"\0\0\0\xbf",
        support=b"\0",
        versions=[{"version": 3, "start": 0, "end": 1}],
        sampling={"temperature": 1.0},
        finish_reason="stop",
        started_at=now,
        ended_at=now,
    )


def read(url: str, dataset: str) -> pa.Table:
    fs, root = fsspec.core.url_to_fs(url)
    if not fs.isdir(f"{root}/{dataset}"):
        return pa.table({"session_id": pa.array([], pa.string())})
    return ds.dataset(f"{root}/{dataset}", filesystem=fs, format="parquet").to_table()


def sessions_in(url: str) -> Counter[str]:
    """How often each interaction's session is in the lake."""
    return Counter(read(url, "interactions")["session_id"].to_pylist())


async def files(db: Database) -> list[tuple[str, int]]:
    f = t.compacted.c.file
    async with db.connect() as c:
        rows = await c.execute(sa.select(f, sa.func.count()).group_by(f))
        return sorted((row[0], row[1]) for row in rows)


@pytest.fixture
async def captured(database: Database) -> Database:
    for at, name in enumerate("abc"):
        await add_session(database, name, SEALED, at=at)
    await add_session(database, "open", SessionState.OPEN)
    await add_session(database, "closed", SessionState.CLOSED)
    await add_session(database, "elsewhere", SEALED, policy="other", at=9)
    return database


async def test_sealed_sessions_go_to_files_of_their_policy_once(
    captured: Database, tmp_path: Path
) -> None:
    url = str(tmp_path / "lake")
    store = lake.Lake(url)
    assert [await compact(captured, store, 2) for _ in range(4)] == [2, 1, 1, 0]
    assert sessions_in(url) == {f"ses_{n}": 2 for n in ("a", "b", "c", "elsewhere")}
    (first, _), (second, _), (third, _) = await files(captured)
    assert first.startswith(f"{TENANT}/{POLICY}/ses_a-2-")
    assert second.startswith(f"{TENANT}/{POLICY}/ses_c-1-")
    assert third.startswith(f"{TENANT}/other/ses_elsewhere-1-")
    await add_session(captured, "d", SEALED)
    assert await compact(captured, store) == 1
    assert not any(path.is_file() for path in (tmp_path / "lake" / "_aside").rglob("*"))


async def test_a_file_holds_what_the_rows_do(captured: Database, tmp_path: Path) -> None:
    url = str(tmp_path / "lake")
    await compact(captured, lake.Lake(url))
    row = read(url, "interactions").sort_by("interaction_id").to_pylist()[0]
    expected = interaction("a", POLICY, 0, row["started_at"])
    structured = {"versions", "sampling", "evidence_gaps", "messages", "answer"}
    for field in dataclasses.fields(Interaction):
        value = getattr(expected, field.name)
        found = row[field.name]
        assert (json.loads(found) if field.name in structured else found) == value, field.name
    samples = read(url, "samples")
    assert {"state", "manifest_id", "drop_reason"}.isdisjoint(samples.column_names)
    first = samples.sort_by("sample_id").to_pylist()[0]
    assert (first["sample_id"], first["versions"]) == ("a", b"\xff\xff\xff\xff" + bytes(8))


@pytest.mark.parametrize("step", ["write_aside", "record", "publish"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_death_anywhere_loses_nothing_and_writes_nothing_twice(
    captured: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    url = str(tmp_path / "lake")
    store = lake.Lake(url)
    owner = lake if step == "record" else store
    whole = getattr(owner, step)

    def dying(*arguments: object) -> object:
        if when == "before":
            raise Died
        whole(*arguments)
        raise Died

    async def dying_in_transaction(*arguments: object) -> None:
        if when == "after":
            await whole(*arguments)
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, dying_in_transaction if step == "record" else dying)
        with pytest.raises(Died):
            await compact(captured, store)
    await add_session(captured, "later", SEALED)
    second = lake.Lake(url)
    while await compact(captured, second):
        pass
    expected = ("a", "b", "c", "elsewhere", "later")
    assert sessions_in(url) == {f"ses_{n}": 2 for n in expected}
    assert sorted(read(url, "samples")["sample_id"].to_pylist()) == sorted(expected)
    assert sum(count for _, count in await files(captured)) == 5
    assert second.aside() == set()


async def test_two_compactors_write_nothing_twice(captured: Database, tmp_path: Path) -> None:
    url = str(tmp_path / "lake")

    async def until_empty() -> int:
        store, written = lake.Lake(url), 0
        for _ in range(6):
            written += await compact(captured, store, 1)
        return written

    written: Sequence[int] = await asyncio.gather(until_empty(), until_empty())
    while await compact(captured, lake.Lake(url)):
        pass
    assert sessions_in(url) == {f"ses_{n}": 2 for n in ("a", "b", "c", "elsewhere")}
    assert sum(written) <= 4


async def test_the_lake_may_be_anywhere_that_fsspec_knows(captured: Database) -> None:
    url = "memory://bucket/lake"
    while await compact(captured, lake.Lake(url)):
        pass
    assert sessions_in(url) == {f"ses_{n}": 2 for n in ("a", "b", "c", "elsewhere")}
