"""One schema: tables and Arrow are rendered from the records and cannot drift from them."""

import dataclasses

import pyarrow as pa
import pytest
import sqlalchemy as sa

from archon import records as r
from archon.storage import tables
from archon.storage.render import arrow_schema

PAIRS = [
    (r.Tenant, tables.tenant), (r.Policy, tables.policy), (r.Key, tables.key),
    (r.Group, tables.group), (r.Session, tables.session), (r.Interaction, tables.interaction),
    (r.Reward, tables.reward), (r.Return, tables.returns), (r.Sample, tables.sample),
    (r.PolicyVersion, tables.version), (r.Replica, tables.replica), (r.Outbox, tables.outbox),
    (r.RolloutDecision, tables.decision),
]  # fmt: skip


@pytest.mark.parametrize(("record", "table"), PAIRS, ids=lambda value: str(value))
def test_columns_and_arrow_fields_are_the_fields_of_the_record(
    record: type, table: sa.Table
) -> None:
    names = [field.name for field in dataclasses.fields(record)]
    assert [column.name for column in table.columns] == names
    assert arrow_schema(record).names == names


def test_every_record_that_has_a_table_is_tested_here() -> None:
    bodies = {"batch_manifest", "compacted_session"}
    assert {table.name for _, table in PAIRS} | bodies >= set(tables.metadata.tables)


def test_types_follow_the_annotations() -> None:
    columns = tables.interaction.columns
    assert isinstance(columns.output_ids.type, sa.LargeBinary)
    assert columns.prefix_parent.nullable and not columns.prompt_sha256.nullable
    schema = arrow_schema(r.Interaction, without=frozenset({"status"}))
    assert schema.field("output_ids").type == pa.binary()
    assert schema.field("started_at").type == pa.timestamp("us", tz="UTC")
    assert "status" not in schema.names


def test_every_row_belongs_to_a_tenant() -> None:
    for table in tables.metadata.sorted_tables:
        assert "tenant_id" in table.columns, table.name
