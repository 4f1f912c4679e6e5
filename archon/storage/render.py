"""One schema: the frozen records, rendered to SQLModel tables and to Arrow.

Invariant: a table's columns are exactly the fields of its record, in order. A test holds the
migrations against them.
"""

import dataclasses
import types
import typing
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg
from sqlmodel import Field, SQLModel

if TYPE_CHECKING:
    import pyarrow as pa

_SQL: dict[Any, Any] = {
    str: sa.Text(),
    int: sa.BigInteger(),
    float: sa.Double(),
    bool: sa.Boolean(),
    bytes: sa.LargeBinary(),
    datetime: sa.DateTime(timezone=True),
}


def fields(record: type) -> dict[str, tuple[Any, bool]]:
    """Name → (plain Python type, nullable) of each field of a record."""
    out = {}
    for name, hint in typing.get_type_hints(record).items():
        args = typing.get_args(hint)
        nullable = typing.get_origin(hint) in (types.UnionType, typing.Union)
        if nullable:
            hint = next(a for a in args if a is not type(None))
        origin = typing.get_origin(hint) or hint
        if isinstance(origin, type) and issubclass(origin, Enum):
            origin = str
        out[name] = (origin, nullable)
    return out


def table(
    record: type,
    name: str,
    primary_key: tuple[str, ...],
    *args: sa.schema.SchemaItem,
    identity: str | None = None,
) -> sa.Table:
    """The SQLModel table of a record; ``args`` are its indexes and constraints."""
    annotations: dict[str, Any] = {}
    namespace: dict[str, Any] = {"__tablename__": name, "__table_args__": args}
    for field, (plain, nullable) in fields(record).items():
        column_args = [sa.Identity()] if field == identity else []
        kind = _SQL.get(plain, pg.JSONB())
        annotations[field] = Any
        namespace[field] = Field(
            sa_column=sa.Column(
                field, kind, *column_args, nullable=nullable, primary_key=field in primary_key
            )
        )
    namespace["__annotations__"] = annotations
    namespace["__module__"] = __name__
    model = types.new_class(
        f"{record.__name__}Row", (SQLModel,), {"table": True}, lambda ns: ns.update(namespace)
    )
    return typing.cast(sa.Table, model.__table__)  # type: ignore[attr-defined]


def arrow_schema(record: type, without: frozenset[str] = frozenset()) -> "pa.Schema":
    """The Arrow schema of a record; JSON fields are strings. ``without`` names what changes."""
    import pyarrow as pa  # most processes need the tables only, and start faster without it

    kinds: dict[Any, pa.DataType] = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
        bytes: pa.binary(),
        datetime: pa.timestamp("us", tz="UTC"),
    }
    return pa.schema(
        [
            pa.field(name, kinds.get(plain, pa.string()), nullable=nullable)
            for name, (plain, nullable) in fields(record).items()
            if name not in without
        ]
    )


def values(record: Any) -> dict[str, Any]:
    """A record as column values: enums by value, nested records as they are."""
    return {
        f.name: value.value if isinstance(value := getattr(record, f.name), Enum) else value
        for f in dataclasses.fields(record)
    }
