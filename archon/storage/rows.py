"""Rows to records and back.

Invariant: a row read by :func:`as_record` is a valid record, or this raises; nothing is guessed.
"""

from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from archon.records.wire import build, hints_of
from archon.storage.render import values

T = TypeVar("T")


def as_record(cls: type[T], row: sa.Row[Any]) -> T:
    """The record of a row that has (at least) the record's columns."""
    mapping, hints = row._mapping, hints_of(cls)
    return cls(**{name: _convert(hints[name], mapping[name]) for name in hints})


def _convert(hint: Any, value: Any) -> Any:
    return value if hint in _AS_IS or hasattr(value, "tzinfo") else build(hint, value)


_AS_IS = (str, int, float, bool, bytes)


def insert_record(
    table: sa.Table, record: Any, *, leave_out: frozenset[str] = frozenset()
) -> Insert:
    """An INSERT of a record; ``leave_out`` names columns that the database fills."""
    return insert(table).values(
        {name: value for name, value in values(record).items() if name not in leave_out}
    )


async def fetch_one(connection: AsyncConnection, cls: type[T], query: sa.Select[Any]) -> T | None:
    """The only row of ``query`` as a record, or None."""
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else as_record(cls, row)


async def fetch_all(connection: AsyncConnection, cls: type[T], query: sa.Select[Any]) -> list[T]:
    """All rows of ``query`` as records."""
    return [as_record(cls, row) for row in await connection.execute(query)]
