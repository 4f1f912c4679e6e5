"""The shared servers: databases are apart, the search attributes are known."""

import asyncio

import sqlalchemy as sa
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client

from archon.stack.temporal import SEARCH_ATTRIBUTES, register_search_attributes, set_retention
from archon.storage import READY_CHANNEL, Database, Listener, notify
from tests.kit.stack import Databases


async def test_a_test_has_a_database_of_its_own(database: Database, databases: Databases) -> None:
    async with database.begin() as connection:
        await connection.execute(sa.text("INSERT INTO tenant VALUES ('acme', now())"))
    other = databases.create()
    second = Database(other)
    async with second.connect() as connection:
        assert (await connection.execute(sa.text("SELECT count(*) FROM tenant"))).scalar() == 0
    await second.close()
    databases.drop(other)


async def test_listener_hears_a_commit(database: Database, database_url: str) -> None:
    async with Listener(database_url, READY_CHANNEL) as listener:
        async with database.begin() as connection:
            await notify(connection, READY_CHANNEL, "default/game")
        assert await asyncio.wait_for(listener.wait(5), 6) == ["default/game"]


async def test_search_attributes_are_known_and_registered_twice(temporal: Client) -> None:
    await register_search_attributes(temporal)
    known = await temporal.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace="default")
    )
    assert set(SEARCH_ATTRIBUTES) <= set(known.custom_attributes)


async def test_retention_can_be_set(temporal: Client) -> None:
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest

    await set_retention(temporal)
    found = await temporal.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace="default")
    )
    assert found.config.workflow_execution_retention_ttl.ToSeconds() == 720 * 3600
