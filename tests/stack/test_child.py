"""Supervised processes: started again when they die, ended in order, never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from archon.stack.child import Child
from archon.stack.errors import StackError
from archon.stack.process import Spec, python

TOUCH_AND_STAY = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"


def script(code: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *args)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.02)


def child_of(folder: Path, code: str, said: list[str], **spec: object) -> Child:
    marker = folder / "marker"

    async def probe(started_at: float) -> bool:
        return marker.exists() and marker.stat().st_mtime >= started_at - 0.01

    return Child(
        Spec("worker", script(code, str(marker)), **spec),  # type: ignore[arg-type]
        probe,
        folder / "worker.log",
        say=said.append,
        changed=lambda: None,
    )


async def test_a_killed_process_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    child = child_of(tmp_path, TOUCH_AND_STAY, said)
    task = asyncio.create_task(child.run())
    await until(child.ready.is_set)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: child.pid not in (None, first) and child.ready.is_set())
    assert child.restarts == 1
    assert said == ["worker ended (signal SIGKILL); starting it again"]
    await child.stop()
    await task
    assert child.state == "stopped"


async def test_a_start_that_fails_is_an_error_with_the_end_of_the_log(tmp_path: Path) -> None:
    child = child_of(tmp_path, "import sys; print('no such model'); sys.exit(3)", [])
    begun = time.monotonic()
    with pytest.raises(StackError, match=r"worker did not start \(exit code 3\)") as failure:
        await child.run()
    assert "no such model" in str(failure.value)
    assert time.monotonic() - begun < 2


async def test_a_program_that_is_missing_is_an_error(tmp_path: Path) -> None:
    child = child_of(tmp_path, "", [])
    child.spec = Spec("worker", (str(tmp_path / "missing"),))
    with pytest.raises(StackError, match="worker cannot be started"):
        await child.run()


async def test_pauses_grow_while_it_keeps_dying(tmp_path: Path) -> None:
    """Ready once, then dead five times at once: 0.1 + 0.2 + 0.4 + 0.8 s of pauses at least."""
    said: list[str] = []
    code = (
        "import pathlib, sys, time; p = pathlib.Path(sys.argv[1]); "
        "first = not p.exists(); p.touch(); time.sleep(0.5 if first else 0)"
    )
    child = child_of(tmp_path, code, said)
    task = asyncio.create_task(child.run())
    await until(child.ready.is_set)
    begun = time.monotonic()
    await until(lambda: child.restarts == 4)
    assert time.monotonic() - begun > 1.5
    await child.stop()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_who_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + TOUCH_AND_STAY
    child = child_of(tmp_path, deaf, said, stop_timeout=0.3)
    task = asyncio.create_task(child.run())
    await until(child.ready.is_set)
    pid = child.pid
    assert pid is not None
    await child.stop()
    await task
    assert is_gone(pid)
    assert said == ["worker did not end in 0 s: killed"]


def test_children_die_with_a_killed_parent() -> None:
    parent = (
        "import subprocess, sys, time\n"
        "from archon.stack.process import Spec, command_line, popen_arguments\n"
        "spec = Spec('x', ('sleep', '60'))\n"
        "p = subprocess.Popen(command_line(spec), **popen_arguments(spec, 2))\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(script(parent), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not is_gone(pid)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 5
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_gone(pid)


def test_the_leash_ends_its_command_when_the_pipe_closes() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    command = python("archon.stack.leash", str(int(signal.SIGKILL)), *script(code))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(10) == 128 + signal.SIGKILL
    assert is_gone(pid)
    process.stdout.close()


def test_the_leash_passes_signals_and_exit_codes_on() -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); "
        "print(); time.sleep(60)"
    )
    command = python("archon.stack.leash", "9", *script(code))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.wait(10) == 5
    process.communicate()
