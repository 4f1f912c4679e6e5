"""The rows that must be there before the processes can work: tenant, policies, replicas.

Invariant: idempotent. What the settings say is written over what was there; what a policy learned
(its baseline, its versions) and what a replica was proven to serve stays.

Plain psycopg: the tables of ``archon.storage`` would double the time of a start.
"""

import dataclasses
from collections.abc import Sequence

import psycopg
from psycopg.types.json import Jsonb

from archon.settings import Settings
from archon.stack.plan import ReplicaPlan

_TENANT = """
INSERT INTO tenant (tenant_id, created_at) VALUES (%s, now()) ON CONFLICT DO NOTHING
"""
_POLICY = """
INSERT INTO policy (tenant_id, policy_id, settings, created_at, baseline_weight)
VALUES (%s, %s, %s, now(), 0)
ON CONFLICT (tenant_id, policy_id) DO UPDATE SET settings = excluded.settings
"""
_OTHER_REPLICAS = "DELETE FROM replica WHERE tenant_id = %s AND NOT replica_id = ANY(%s)"
_REPLICA = """
INSERT INTO replica AS r (replica_id, tenant_id, policy_id, url, kind, created_at, instance)
VALUES (%s, %s, %s, %s, %s, now(), '')
ON CONFLICT (replica_id) DO UPDATE SET
    tenant_id = excluded.tenant_id, policy_id = excluded.policy_id,
    url = excluded.url, kind = excluded.kind,
    version = CASE WHEN (r.url, r.policy_id) = (excluded.url, excluded.policy_id)
                   THEN r.version END,
    instance = CASE WHEN (r.url, r.policy_id) = (excluded.url, excluded.policy_id)
                    THEN r.instance ELSE '' END
"""


def write_rows(url: str, settings: Settings, replicas: Sequence[ReplicaPlan]) -> None:
    """The tenant, its policies and its replicas, in one transaction."""
    tenant_id = settings.tenant
    with psycopg.connect(url) as connection:
        connection.execute(_TENANT, (tenant_id,))
        for name in settings.policies:
            fields = dataclasses.asdict(settings.policy(name))
            connection.execute(_POLICY, (tenant_id, name, Jsonb(fields)))
        connection.execute(_OTHER_REPLICAS, (tenant_id, [plan.replica_id for plan in replicas]))
        for plan in replicas:
            connection.execute(
                _REPLICA, (plan.replica_id, tenant_id, plan.policy_id, plan.url, plan.kind)
            )
