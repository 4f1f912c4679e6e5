"""The engine's process group: deaths, silence and noise, by a scripted engine."""

import asyncio
import os
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from activities.engine_group import EngineGroup, EngineLost, Event

ENGINE = Path(__file__).with_name("fake_engine.py")


def group_with(
    folder: Path, *plan: str, silence: float = 5.0, patience: float = 5.0
) -> EngineGroup:
    file = folder / "plan"
    file.write_text("\n".join(plan))
    command = [sys.executable, str(ENGINE), str(file)]
    return EngineGroup(command, silence=silence, patience=patience)


def step(folder: Path, attempt: str = "a1") -> Event:
    batch = folder / "batch"
    batch.write_bytes(b"batch")
    return {"op": "step", "batch": str(batch), "out": str(folder / "out"), "attempt": attempt}


async def run(group: EngineGroup, operation: Event) -> list[Event]:
    return [event async for event in group.operate(operation)]


def pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "plan.pids").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


async def test_one_process_serves_step_after_step(tmp_path: Path) -> None:
    group = group_with(tmp_path, "garbage", "ok")
    first = await run(group, step(tmp_path))
    assert [e["event"] for e in first] == ["progress", "progress", "done"]
    assert (await run(group, step(tmp_path)))[-1]["spans"] == {"save": 0.25}
    assert len(pids(tmp_path)) == 1
    await group.stop()
    assert not is_alive(pids(tmp_path)[0])


async def test_a_death_is_noticed_at_once_and_says_why(tmp_path: Path) -> None:
    group = group_with(tmp_path, "die", "ok")
    await group.warm()
    begin = time.monotonic()
    with pytest.raises(EngineLost, match=r"(?s)exit status 7.*cannot allocate 7 bytes"):
        await run(group, step(tmp_path))
    assert time.monotonic() - begin < 2
    assert (await run(group, step(tmp_path)))[-1]["event"] == "done"
    assert len(pids(tmp_path)) == 2
    await group.kill()


async def test_silence_ends_the_group_and_a_busy_span_does_not(tmp_path: Path) -> None:
    group = group_with(tmp_path, "busy:0.8", "busy:1.2", "silent", silence=0.7, patience=2.0)
    await run(group, step(tmp_path))
    # Longer than the silence allowed, but not beyond what this span is known for.
    await run(group, step(tmp_path))
    begin = time.monotonic()
    with pytest.raises(EngineLost, match="silent for 1.[89] s in step/logprobs"):
        await run(group, step(tmp_path))
    assert time.monotonic() - begin < 3
    assert not any(map(is_alive, pids(tmp_path)))


async def test_an_engine_that_cannot_start_is_an_error_each_time(tmp_path: Path) -> None:
    group = group_with(tmp_path, "start:die", "ok")
    with pytest.raises(EngineLost, match=r"(?s)exit status 3.*no CUDA for you"):
        await group.warm()
    assert (await run(group, step(tmp_path)))[-1]["event"] == "done"
    await group.kill()


async def test_leaving_an_operation_kills_the_group(tmp_path: Path) -> None:
    group = group_with(tmp_path, "busy:30")
    async with aclosing(group.operate(step(tmp_path))) as events:
        await anext(events)
    assert not is_alive(pids(tmp_path)[0])
    task = asyncio.create_task(run(group_with(tmp_path, "busy:30"), step(tmp_path)))
    while len(pids(tmp_path)) < 2:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(pids(tmp_path)[1])


async def test_an_idle_engine_that_died_is_replaced(tmp_path: Path) -> None:
    group = group_with(tmp_path, "ok", "ok")
    await run(group, step(tmp_path))
    os.kill(pids(tmp_path)[0], 9)
    await asyncio.sleep(0.2)
    assert (await run(group, step(tmp_path)))[-1]["event"] == "done"
    assert len(pids(tmp_path)) == 2
    await group.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
async def test_the_engine_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("busy:30")
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.activities.test_engine_group import group_with, run, step\n"
        "folder = Path(sys.argv[1])\n"
        "asyncio.run(run(group_with(folder, 'busy:30'), step(folder)))\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path))
    while not (tmp_path / "plan.operations").exists():
        await asyncio.sleep(0.05)
    (engine,) = pids(tmp_path)
    assert is_alive(engine)
    parent.kill()
    await parent.wait()
    for _ in range(100):
        if not is_alive(engine):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"engine {engine} outlived its parent")
