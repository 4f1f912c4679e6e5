"""Sees to it that every policy in the database has its workflow.

Invariant: a policy's workflow is started once; one that finished its steps stays finished, one that
failed or was terminated is started again.
"""

import asyncio
import logging

import psycopg
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from temporalio.client import Client
from temporalio.common import (
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from archon.records.messages import (
    ATTR_POLICY,
    ATTR_TENANT,
    PolicyInput,
    main_queue,
    policy_workflow_id,
)
from archon.storage import Database
from archon.storage import tables as t

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


async def start_policy(client: Client, queue_prefix: str, tenant_id: str, policy_id: str) -> None:
    """Start the workflow of a policy, if it does not run and has not finished."""
    values = {ATTR_TENANT: tenant_id, ATTR_POLICY: policy_id}
    try:
        await client.start_workflow(
            "PolicyWorkflow",
            PolicyInput(tenant_id, policy_id, queue_prefix),
            id=policy_workflow_id(tenant_id, policy_id),
            task_queue=main_queue(queue_prefix),
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(SearchAttributeKey.for_keyword(name), value)
                    for name, value in values.items()
                ]
            ),
        )
    except WorkflowAlreadyStartedError:
        return


async def run_policies(client: Client, db: Database, queue_prefix: str) -> None:
    """Look for policies without a workflow until cancelled."""
    started: set[tuple[str, str]] = set()
    while True:
        try:
            async with db.connect() as c:
                rows = await c.execute(select(t.policy.c.tenant_id, t.policy.c.policy_id))
                found = {(row.tenant_id, row.policy_id) for row in rows}
            for tenant_id, policy_id in sorted(found - started):
                await start_policy(client, queue_prefix, tenant_id, policy_id)
                started.add((tenant_id, policy_id))
        except (RPCError, SQLAlchemyError, psycopg.Error, OSError) as error:
            log.warning("policies: again in a while: %s", str(error).splitlines()[0])
        await asyncio.sleep(LOOK_SECONDS)
