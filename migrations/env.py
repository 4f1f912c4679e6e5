"""Alembic's entry: migrates the connection that it is given, else ``ARCHON_POSTGRES__URL``."""

import os

import sqlalchemy as sa
from alembic import context

from archon.storage.database import async_url
from archon.storage.tables import metadata


def _run(connection: sa.Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, compare_type=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
else:
    engine = sa.create_engine(async_url(os.environ["ARCHON_POSTGRES__URL"]))
    with engine.connect() as own:
        _run(own)
        own.commit()
