"""The lock, the ports and the logs of a data folder."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from archon.stack.errors import StackError
from archon.stack.logs import Follower, last_lines, open_log, trim
from archon.stack.state import Lock, Ports, ended_unclean, holder, write_state


def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "run"
    folder.mkdir(parents=True)
    return folder


def test_a_second_supervisor_is_refused_by_name(tmp_path: Path) -> None:
    folder = run_dir(tmp_path)
    assert holder(folder) is None
    lock = Lock(folder)
    lock.take()
    assert holder(folder) == os.getpid()
    with pytest.raises(StackError, match=rf"running on {tmp_path}/data \(pid {os.getpid()}\)"):
        Lock(folder).take()
    lock.release()
    assert holder(folder) is None


def test_who_only_looks_does_not_keep_a_supervisor_from_starting(tmp_path: Path) -> None:
    folder = run_dir(tmp_path)
    (folder / "supervisor.lock").touch()
    looking = os.open(folder / "supervisor.lock", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.1, os.close, (looking,))
    timer.start()
    Lock(folder).take()
    assert holder(folder) == os.getpid()
    timer.join()


def test_a_killed_supervisor_leaves_no_lock(tmp_path: Path) -> None:
    folder = run_dir(tmp_path)
    code = (
        "import sys, time, pathlib; from archon.stack.state import Lock; "
        "Lock(pathlib.Path(sys.argv[1])).take(); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert holder(folder) == process.pid
        process.send_signal(signal.SIGKILL)
    assert holder(folder) is None
    Lock(folder).take()


def test_an_end_in_order_is_told_from_a_kill(tmp_path: Path) -> None:
    folder = run_dir(tmp_path)
    assert not ended_unclean(folder)
    write_state(folder, {"status": "ready"})
    assert ended_unclean(folder)
    write_state(folder, {"status": "stopped"})
    assert not ended_unclean(folder)


def test_a_taken_port_is_named_with_its_process_and_its_setting(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StackError) as refusal:
            Ports(run_dir(tmp_path)).fixed("temporal-ui", "127.0.0.1", port, "temporal.ui_port")
    for word in (str(port), "temporal-ui", "temporal.ui_port", "ARCHON_TEMPORAL__UI_PORT"):
        assert word in str(refusal.value)


def test_two_processes_may_not_be_set_to_one_port(tmp_path: Path) -> None:
    ports = Ports(run_dir(tmp_path))
    port = ports.any("a")
    with pytest.raises(StackError, match=f"port {port} for gateway is taken"):
        ports.fixed("gateway", "127.0.0.1", port, "gateway.port")


def test_a_picked_port_is_kept_until_somebody_else_has_it(tmp_path: Path) -> None:
    folder = run_dir(tmp_path)
    first = Ports(folder).any("rep_0")
    assert Ports(folder).any("rep_0") == first
    assert Ports(folder).fixed("rep_0", "127.0.0.1", 0, "x") == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert Ports(folder).any("rep_0") != first


def test_a_log_is_bounded_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    descriptor = open_log(log)
    os.write(descriptor, b"old\n" * 100)
    trim(log, limit=400)
    assert log.stat().st_size == 400
    os.write(descriptor, b"more\n")
    trim(log, limit=400)
    os.write(descriptor, b"new\n")
    os.close(descriptor)
    assert log.read_text() == "new\n"
    assert (tmp_path / "gateway.log.1").read_text().endswith("old\nmore\n")


def test_following_gives_whole_lines_with_names_and_survives_a_trim(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("before\n")
    follower = Follower([log])
    with log.open("a") as file:
        file.write("one\ntw")
    assert list(follower.new_lines()) == [("worker", "one")]
    with log.open("a") as file:
        file.write("o\n")
    assert list(follower.new_lines()) == [("worker", "two")]
    os.truncate(log, 0)
    log.write_text("x\n")
    assert list(follower.new_lines()) == [("worker", "x")]
    assert last_lines(log, 5) == ["x"]
    assert last_lines(tmp_path / "none.log", 5) == []
