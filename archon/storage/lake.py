"""Captured data as Parquet: what never changes of sealed sessions, in files of many.

Invariant: a session is in exactly one file of each dataset. A file is written aside, then the
rows that name it are committed, then it is published by one rename; whoever comes after a crash
publishes what rows name and throws the rest away. Files without a row do not count, nor do rows
make their file wait: both are mended by :meth:`Lake.mend`.

``LAKE/interactions/TENANT/POLICY/FILE`` and ``LAKE/samples/…``, one column per field of the record
that does not change after sealing; structured fields are JSON text.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records import Interaction, Sample, SessionState
from archon.storage import tables as t
from archon.storage.render import arrow_schema

SCHEMAS: dict[str, pa.Schema] = {
    "interactions": arrow_schema(Interaction),
    "samples": arrow_schema(Sample, frozenset({"state", "manifest_id", "drop_reason"})),
}
_TABLES = {"interactions": t.interaction, "samples": t.sample}
_ORDER = {"interactions": ("session_id", "seq"), "samples": ("session_id", "sample_id")}
_ASIDE = "_aside"
_LOCK = 0x61726368


@dataclass(frozen=True)
class Batch:
    """The sessions of one file, and its name within each dataset."""

    tenant_id: str
    policy_id: str
    sessions: list[str]
    file: str


class Lake:
    """The files. Blocking: call it from a thread."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url)

    def write_aside(self, batch: Batch, tables: dict[str, pa.Table]) -> None:
        for dataset, table in tables.items():
            path = self._path(_ASIDE, dataset, batch.file)
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._fs.open(path, "wb") as file:
                pq.write_table(table, file, compression="zstd")
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())

    def publish(self, file: str) -> None:
        """Move what lies aside to its place; nothing happens where it was moved before."""
        for dataset in SCHEMAS:
            aside, place = self._path(_ASIDE, dataset, file), self._path(dataset, file)
            self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            try:
                self._fs.mv(aside, place)
            except FileNotFoundError:
                if not self._fs.exists(place):
                    raise

    def aside(self) -> set[str]:
        """The files that were written and not published."""
        found = set()
        for dataset in SCHEMAS:
            folder = self._path(_ASIDE, dataset)
            if self._fs.isdir(folder):
                found |= {path.removeprefix(f"{folder}/") for path in self._fs.find(folder)}
        return found

    def mend(self, named: Iterable[str]) -> None:
        """Publish what lies aside and is ``named`` by rows; throw the rest away."""
        for file in self.aside():
            if file in set(named):
                self.publish(file)
                continue
            for dataset in SCHEMAS:
                path = self._path(_ASIDE, dataset, file)
                if self._fs.exists(path):
                    self._fs.rm_file(path)

    @property
    def _is_local(self) -> bool:
        return "file" in self._fs.protocol

    def _path(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))


async def try_lock(c: AsyncConnection) -> bool:
    """One compactor at a time, until the transaction ends."""
    return bool((await c.execute(sa.select(sa.func.pg_try_advisory_xact_lock(_LOCK)))).scalar_one())


async def named_among(c: AsyncConnection, files: Iterable[str]) -> set[str]:
    """Those of ``files`` that rows name."""
    query = sa.select(t.compacted.c.file).where(t.compacted.c.file.in_(list(files))).distinct()
    return set((await c.execute(query)).scalars())


async def next_batch(c: AsyncConnection, limit: int) -> Batch | None:
    """Up to ``limit`` sealed sessions of one policy that no file has yet, oldest first."""
    s = t.session.c
    waiting = sa.and_(
        s.state == SessionState.SEALED.value,
        ~sa.exists().where(t.compacted.c.session_id == s.session_id),
    )
    oldest = sa.select(s.tenant_id, s.policy_id).where(waiting).order_by(s.sealed_at).limit(1)
    policy = (await c.execute(oldest)).one_or_none()
    if policy is None:
        return None
    query = sa.select(s.session_id).where(
        waiting, s.tenant_id == policy.tenant_id, s.policy_id == policy.policy_id
    )
    names = list(
        (await c.execute(query.order_by(s.sealed_at, s.session_id).limit(limit))).scalars()
    )
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    file = f"{policy.tenant_id}/{policy.policy_id}/{names[0]}-{len(names)}-{digest}.parquet"
    return Batch(policy.tenant_id, policy.policy_id, names, file)


async def read_tables(c: AsyncConnection, batch: Batch) -> dict[str, pa.Table]:
    """Everything of the batch's sessions, as Arrow."""
    tables = {}
    for dataset, schema in SCHEMAS.items():
        source = _TABLES[dataset]
        columns = [source.c[name] for name in schema.names]
        order = [source.c[name] for name in _ORDER[dataset]]
        query = sa.select(*columns).where(source.c.session_id.in_(batch.sessions)).order_by(*order)
        rows = (await c.execute(query)).all()
        tables[dataset] = _table(schema, rows)
    return tables


def _table(schema: pa.Schema, rows: Sequence[sa.Row[Any]]) -> pa.Table:
    columns = [
        pa.array([_plain(row[index]) for row in rows], field.type)
        for index, field in enumerate(schema)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (dict, list)) else value


async def record(c: AsyncConnection, batch: Batch, now: datetime) -> None:
    """Write down which file has which session; a second file for one is a unique violation."""
    rows = [
        {
            "session_id": name,
            "tenant_id": batch.tenant_id,
            "policy_id": batch.policy_id,
            "file": batch.file,
            "created_at": now,
        }
        for name in batch.sessions
    ]
    await c.execute(sa.insert(t.compacted), rows)
