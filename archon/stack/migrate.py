"""The database's schema, brought to the newest revision.

Invariant: one process migrates at a time; the others wait for it on an advisory lock.
"""

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from archon.stack.process import ROOT
from archon.storage.database import async_url

_LOCK = 0x61726368  # "arch"


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(ROOT / "migrations"))
    return config


def migrate(url: str) -> str:
    """Bring the database at ``url`` to the newest revision, which is returned."""
    config = alembic_config()
    head = ScriptDirectory.from_config(config).get_current_head()
    assert head is not None, "migrations/versions is empty"
    engine = sa.create_engine(async_url(url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        lock = {"lock": _LOCK}
        connection.execute(sa.text("SELECT pg_advisory_lock(:lock)"), lock)
        try:
            connection.commit()
            if _current(connection) != head:
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
                connection.commit()
        finally:
            connection.rollback()
            connection.execute(sa.text("SELECT pg_advisory_unlock(:lock)"), lock)
            connection.commit()
    return head


def create_database(admin_url: str, name: str) -> None:
    """Make the database ``name`` unless it is there; ``admin_url`` is of another one."""
    engine = sa.create_engine(
        async_url(admin_url), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        query = sa.text("SELECT 1 FROM pg_database WHERE datname = :name")
        if connection.execute(query, {"name": name}).first() is None:
            connection.execute(sa.text(f'CREATE DATABASE "{name}"'))


def _current(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
