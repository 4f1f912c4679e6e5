"""The migrations make exactly the tables that the code uses."""

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from archon.stack.errors import StackError
from archon.stack.migrate import alembic_config, migrate, newest_revision
from archon.storage.database import async_url
from archon.storage.tables import metadata


def test_migrated_schema_equals_the_tables(database_url: str) -> None:
    engine = sa.create_engine(async_url(database_url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []


def test_comparison_sees_a_missing_column(database_url: str) -> None:
    engine = sa.create_engine(async_url(database_url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text("ALTER TABLE session DROP COLUMN trainable"))
        changes = compare_metadata(MigrationContext.configure(connection), metadata)
    assert [(change[0], change[3].name) for change in changes] == [("add_column", "trainable")]


def test_migrating_again_changes_nothing(database_url: str) -> None:
    engine = sa.create_engine(async_url(database_url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO tenant VALUES ('acme', now())"))
    assert migrate(database_url) == newest_revision()
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT tenant_id FROM tenant")).scalars().all() == [
            "acme"
        ]


def test_the_newest_file_is_alembics_only_head() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [newest_revision()]


def test_a_database_of_a_newer_archon_is_refused(database_url: str) -> None:
    engine = sa.create_engine(async_url(database_url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StackError, match="at revision 9999"):
        migrate(database_url)
