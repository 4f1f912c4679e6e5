"""The database's schema, brought to the newest revision.

Invariant: one process migrates at a time; the others wait for it on an advisory lock. A database
that is at the newest revision is left alone without loading Alembic, which takes a second.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from archon.stack.errors import StackError
from archon.stack.process import ROOT

if TYPE_CHECKING:
    from alembic.config import Config

_LOCK = 0x61726368  # "arch"
_FOLDER = ROOT / "migrations"


def newest_revision(folder: Path = _FOLDER / "versions") -> str:
    """The revision of the last file; files are named ``REVISION_words.py``, in order."""
    return max(path.name.partition("_")[0] for path in folder.glob("[0-9]*_*.py"))


def migrate(url: str) -> str:
    """Bring the database at ``url`` to the newest revision, which is returned."""
    newest = newest_revision()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        found = _current(connection)
        if found is not None and found > newest:
            raise StackError(
                f"the database is at revision {found}, this Archon knows {newest} at most: "
                "start the Archon that wrote it, or a newer one."
            )
        if found != newest:
            _upgrade(url)
    return newest


def create_database(admin_url: str, name: str) -> None:
    """Make the database ``name`` unless it is there; ``admin_url`` is of another one."""
    with psycopg.connect(admin_url, autocommit=True) as connection:
        found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
        if found.fetchone() is None:
            identifier = sql.Identifier(name)
            connection.execute(sql.SQL("CREATE DATABASE {}").format(identifier))


def alembic_config() -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_FOLDER))
    return config


def _current(connection: psycopg.Connection[tuple[object, ...]]) -> str | None:
    if connection.execute("SELECT to_regclass('alembic_version')").fetchone() == (None,):
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def _upgrade(url: str) -> None:
    import sqlalchemy as sa
    from alembic import command

    from archon.storage.database import async_url

    config = alembic_config()
    engine = sa.create_engine(async_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
