"""One PostgreSQL and one Temporal server per test session, started when a test first asks.

Invariant: a test has a database of its own, cloned from a migrated template; the servers die with
the test process.
"""

import contextlib
import dataclasses
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from archon.stack import postgres, temporal
from archon.stack.migrate import create_database, migrate
from archon.stack.process import Spec, command_line, popen_arguments

TEMPLATE = "archon_template"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder that an unprivileged server can enter, with a path short for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="archon-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(spec: Spec, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a spec; stopped at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(command_line(spec), **popen_arguments(spec, output.fileno()))
    try:
        yield process
    finally:
        process.send_signal(spec.stop_signal)
        try:
            process.wait(spec.stop_timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_postgres(url: str, timeout: float = 15.0) -> None:
    """Return once SELECT 1 works."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with psycopg.connect(url, connect_timeout=2) as connection:
                connection.execute("SELECT 1")
                return
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Databases:
    """Clones of a migrated template on one running server."""

    def __init__(self, server: postgres.Postgres) -> None:
        self._server = server
        wait_for_postgres(server.url("postgres"))
        create_database(server.url("postgres"), TEMPLATE)
        migrate(server.url(TEMPLATE))

    def create(self) -> str:
        """The URL of a fresh database."""
        name = f"t_{secrets.token_hex(6)}"
        self._admin(f'CREATE DATABASE "{name}" TEMPLATE "{TEMPLATE}"')
        return self._server.url(name)

    def drop(self, url: str) -> None:
        name = url.split("?", 1)[0].rsplit("/", 1)[1]
        self._admin(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _admin(self, statement: str) -> None:
        with psycopg.connect(self._server.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)


@contextlib.contextmanager
def postgres_server() -> Iterator[Databases]:
    """A server without fsync: a test's data need not survive the machine."""
    fast = (("fsync", "off"), ("full_page_writes", "off"), ("autovacuum", "off"))
    with short_folder() as folder:
        server = postgres.prepare(
            folder / "postgres", folder / "secrets" / "password", options=fast, sync=False
        )
        with running(server.spec(), folder / "postgres.log"):
            yield Databases(server)


@contextlib.contextmanager
def temporal_server() -> Iterator[str]:
    """The address of a dev server in memory."""
    port = free_port()
    with short_folder() as folder:
        spec = temporal.spec(port=port, ui_port=None, database=None)
        spec = dataclasses.replace(spec, stop_signal=signal.SIGKILL)  # nothing to save
        with running(spec, folder / "temporal.log"):
            yield f"127.0.0.1:{port}"
