"""The rows that must be there before the processes can work: tenant, policies, replicas.

Invariant: idempotent. What the settings say is written over what was there; what a policy learned
(its baseline, its versions) and what a replica was proven to serve stays.
"""

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from archon.records import Policy, Replica, Tenant, system_clock
from archon.settings import Settings
from archon.stack.plan import ReplicaPlan
from archon.storage import tables
from archon.storage.database import async_url
from archon.storage.render import values


def write_rows(url: str, settings: Settings, replicas: Sequence[ReplicaPlan]) -> None:
    """The tenant, its policies and its replicas, in one transaction."""
    tenant_id, now = settings.tenant, system_clock()
    engine = sa.create_engine(async_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(
            insert(tables.tenant).values(values(Tenant(tenant_id, now))).on_conflict_do_nothing()
        )
        for name in settings.policies:
            fields = dataclasses.asdict(settings.policy(name))
            row = insert(tables.policy).values(values(Policy(tenant_id, name, fields, now)))
            connection.execute(
                row.on_conflict_do_update(
                    index_elements=["tenant_id", "policy_id"],
                    set_={"settings": row.excluded.settings},
                )
            )
        _write_replicas(connection, tenant_id, replicas)


def _write_replicas(
    connection: sa.Connection, tenant_id: str, replicas: Sequence[ReplicaPlan]
) -> None:
    table, now = tables.replica, system_clock()
    wanted = [plan.replica_id for plan in replicas]
    connection.execute(
        sa.delete(table).where(table.c.tenant_id == tenant_id, table.c.replica_id.not_in(wanted))
    )
    for plan in replicas:
        record = Replica(plan.replica_id, tenant_id, plan.policy_id, plan.url, plan.kind, now)
        row = insert(table).values(values(record))
        moved = sa.or_(table.c.url != row.excluded.url, table.c.policy_id != row.excluded.policy_id)
        connection.execute(
            row.on_conflict_do_update(
                index_elements=["replica_id"],
                set_={
                    "url": row.excluded.url,
                    "kind": row.excluded.kind,
                    "tenant_id": row.excluded.tenant_id,
                    "policy_id": row.excluded.policy_id,
                    "version": sa.case((moved, sa.null()), else_=table.c.version),
                    "instance": sa.case((moved, ""), else_=table.c.instance),
                },
            )
        )
