"""Our own PostgreSQL: whom it runs as, what it refuses, what it survives."""

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from archon.stack import postgres, programs
from archon.stack.errors import StackError
from archon.stack.process import ServiceUser, service_user
from tests.kit.stack import running, short_folder, wait_for_postgres

pytestmark = pytest.mark.stack
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


def prepare(folder: Path) -> postgres.Postgres:
    return postgres.prepare(folder / "postgres", folder / "secrets" / "password", sync=False)


def one(server: postgres.Postgres, query: str) -> object:
    with psycopg.connect(server.url("postgres")) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Postgres]:
    with short_folder() as base:
        users = Path("/etc/passwd").read_bytes()
        made = prepare(base)
        with running(made.spec(), base / "log"):
            wait_for_postgres(made.url("postgres"))
            yield made
        assert Path("/etc/passwd").read_bytes() == users


@pytest.fixture
def no_initdb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that is only a folder, for tests that start no server."""

    def make(server: postgres.Postgres, sync: bool) -> None:
        server.data.mkdir()
        (server.data / "PG_VERSION").write_text("18")

    monkeypatch.setattr(postgres, "_initdb", make)


def test_no_tcp_a_private_socket_and_a_password(server: postgres.Postgres) -> None:
    assert one(server, "SHOW listen_addresses") == ""
    assert one(server, "SHOW fsync") == "on"
    assert one(server, "SHOW password_encryption") == "scram-sha-256"
    stranger = server.url("postgres").replace(server.password, "guess")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(stranger)
    secrets = server.folder.parent / "secrets"
    assert stat.S_IMODE((secrets / "password").stat().st_mode) == 0o600
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    assert sorted(p.name for p in server.folder.iterdir()) == ["data", "socket"]
    assert not [p for p in server.data.rglob("*") if _contains(p, server.password)]


def _contains(path: Path, text: str) -> bool:
    return path.is_file() and path.stat().st_size < 1 << 16 and text.encode() in path.read_bytes()


@as_root
def test_root_drops_to_a_user_that_exists(server: postgres.Postgres) -> None:
    user = service_user()
    assert user is not None
    assert user.uid != 0
    pid = int((server.data / "postmaster.pid").read_text().split()[0])
    assert Path(f"/proc/{pid}").stat().st_uid == user.uid


@as_root
def test_a_folder_on_the_way_that_is_closed_is_refused_and_stays_as_it_is(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(StackError, match=f"cannot enter {closed}, on the way to") as refusal:
        prepare(closed / "inside")
    assert "--data-dir" in str(refusal.value)
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert list(closed.iterdir()) == []


@as_root
def test_programs_out_of_reach_are_copied_and_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = programs.find_binaries().parents[1]
    closed = folder / "root"
    for part in (wheel, wheel.with_name(wheel.name + ".libs")):
        (closed / part.name).parent.mkdir(exist_ok=True)
        if part.is_dir():
            (closed / part.name).symlink_to(part)
    closed.chmod(0o700)
    place = closed / programs.find_binaries().relative_to(wheel.parent)
    monkeypatch.setattr(postgres, "find_binaries", lambda: place)
    server = prepare(folder)
    assert server.binaries.is_relative_to(server.folder)
    with running(server.spec(), folder / "log"):
        wait_for_postgres(server.url("postgres"))
        assert one(server, "SELECT 1") == 1
    assert prepare(folder).binaries == server.binaries
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700


@as_root
def test_without_an_unprivileged_user_root_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archon.stack.process._SERVICE_USERS", ("no-such-user",))
    with pytest.raises(StackError, match="does not run as root, and none of the users no-such"):
        prepare(folder)


def test_a_long_path_gets_a_short_socket(folder: Path) -> None:
    deep = folder / ("d" * 60) / ("e" * 60)
    server = prepare(deep)
    try:
        path = server.socket / ".s.PGSQL.5432"
        assert len(os.fsencode(path)) <= 103
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
        with running(server.spec(), folder / "log"):
            wait_for_postgres(server.url("postgres"))
            assert path.is_socket()
        found = postgres.existing_url(deep / "postgres", deep / "secrets" / "password")
        assert found == server.url("archon")
        server.socket.chmod(0o755)
        with pytest.raises(StackError, match="only PostgreSQL's user may enter"):
            prepare(deep)
    finally:
        server.socket.rmdir()


def test_what_was_committed_survives_a_kill(folder: Path) -> None:
    server = prepare(folder)
    with running(server.spec(), folder / "log") as process:
        wait_for_postgres(server.url("postgres"))
        with psycopg.connect(server.url("postgres")) as connection:
            connection.execute("CREATE TABLE kept (n int)")
            connection.execute("INSERT INTO kept VALUES (7)")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (server.data / "postmaster.pid").exists()
    again = prepare(folder)
    assert again.password == server.password
    with running(again.spec(), folder / "log"):
        wait_for_postgres(again.url("postgres"))
        assert one(again, "SELECT n FROM kept") == 7


def test_a_pid_file_that_names_another_program_is_removed(folder: Path, no_initdb: None) -> None:
    server = prepare(folder)
    stale = server.data / "postmaster.pid"
    other = subprocess.Popen(["sleep", "60"])
    try:
        stale.write_text(f"{other.pid}\n{server.data}\n0\n5432\n\n\n\n")
        prepare(folder)
        assert not stale.exists()
    finally:
        other.kill()
        other.wait()


def test_a_zombie_does_not_count_as_a_server(folder: Path, no_initdb: None) -> None:
    server = prepare(folder)
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    (server.data / "postmaster.pid").write_text(f"{zombie.pid}\n")
    prepare(folder)
    assert not (server.data / "postmaster.pid").exists()
    zombie.wait()


def test_the_pid_file_of_a_living_server_stays(server: postgres.Postgres) -> None:
    before = (server.data / "postmaster.pid").read_text()
    prepare(server.folder.parent)
    assert (server.data / "postmaster.pid").read_text() == before


def test_an_initdb_that_was_cut_short_is_done_again(folder: Path) -> None:
    half = folder / "postgres" / "data.new"
    half.mkdir(parents=True)
    if user := service_user():
        os.chown(half.parent, user.uid, user.gid)
    (half / "base").touch()
    server = prepare(folder)
    assert (server.data / "PG_VERSION").read_text().strip() == "18"
    assert not (server.data / "base").is_file()
    assert not half.exists()


def test_closed_to_counts_the_owner_the_group_and_the_others(tmp_path: Path) -> None:
    from archon.stack.files import closed_to

    user = ServiceUser("someone", 4242, 4243)
    with short_folder() as base:
        inner = base / "inner"
        inner.mkdir()
        inner.chmod(0o700)
        assert closed_to(inner / "x", user) == inner
        inner.chmod(0o701)
        assert closed_to(inner / "x", user) is None
        if os.geteuid() == 0:
            os.chown(inner, 0, user.gid)
            assert closed_to(inner / "x", user) == inner
            inner.chmod(0o710)
            assert closed_to(inner / "x", user) is None
            os.chown(inner, 0, 0)
        inner.chmod(0o700)
        (inner / "open").mkdir()
        (base / "link").symlink_to(inner / "open")
        assert closed_to(base / "link" / "x", user) == inner
