"""Agents as processes: how they are given episodes, and what becomes of those that misbehave."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from archon.cli.agents import Agents, AutoAgents, LineAgents, OnceAgents, Order, make_agents
from archon.cli.members import Pace

LINES = """
import json, os, sys
for line in sys.stdin:
    order = json.loads(line)
    target = order["task"]["target"]
    if target == "die":
        sys.exit("out of luck")
    if target == "hang":
        continue
    print("thinking about", order["episode"], flush=True)
    print(json.dumps({"episode": "never heard of it", "reward": 9}), flush=True)
    report = {"episode": order["episode"], "reward": target / 10, "turns": 2, "errors": [],
              "pid": os.getpid()}
    print(json.dumps(report | {"said": [order["base_url"], order["api_key"]]}), flush=True)
"""
ONCE = """
import json, os, sys
task = json.loads(os.environ["ARCHON_TASK"])
if task["target"] == "die":
    sys.exit("out of luck")
seen = {k: os.environ[k] for k in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL",
                                   "ARCHON_SESSION")}
open("seen.json", "w").write(json.dumps(seen))
if task["target"] != "quiet":
    print(json.dumps({"episode": "x", "reward": task["target"] / 10, "turns": 1}))
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(text: str, name: str = "agent.py") -> list[str]:
    Path(name).write_text(text)
    return [sys.executable, name]


def order(episode: str, target: object) -> Order:
    return Order(episode, "http://gateway", f"sk-sess-{episode}", f"ses_{episode}",
                 {"target": target})  # fmt: skip


async def test_a_line_agent_plays_many_at_once_in_one_process() -> None:
    agents = LineAgents(script(LINES), 1)
    reports = await asyncio.gather(*(agents.play(order(f"e{n}", n)) for n in range(10)))
    assert [r.reward for r in reports] == [n / 10 for n in range(10)]
    assert {(r.turns, tuple(r.errors)) for r in reports} == {(2, ())}
    await agents.close()


async def test_line_agents_share_the_work() -> None:
    agents = LineAgents(script(LINES), 2)
    hanging = [asyncio.create_task(agents.play(order(f"h{n}", "hang"))) for n in range(4)]
    await asyncio.sleep(0.1)
    assert [player.busy for player in agents._players] == [2, 2]
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert [player.busy for player in agents._players] == [0, 0]
    await agents.close()


async def test_the_death_of_a_line_agent_fails_what_it_had_and_no_more() -> None:
    agents = LineAgents(script(LINES), 1)
    hanging = asyncio.create_task(agents.play(order("h", "hang")))
    await asyncio.sleep(0.3)
    died = await agents.play(order("d", "die"))
    for report in (died, await hanging):
        assert len(report.errors) == 1
        assert "ended with status 1" in report.errors[0]
        assert "out of luck" in report.errors[0]
    assert (await agents.play(order("next", 5))).reward == 0.5
    await agents.close()


async def test_an_agent_for_one_episode_is_told_by_its_environment() -> None:
    agents = OnceAgents(script(ONCE))
    assert (await agents.play(order("e", 7))).reward == 0.7
    assert json.loads(Path("seen.json").read_text()) == {
        "OPENAI_BASE_URL": "http://gateway/v1",
        "OPENAI_API_KEY": "sk-sess-e",
        "ANTHROPIC_BASE_URL": "http://gateway",
        "ARCHON_SESSION": "ses_e",
    }
    quiet = await agents.play(order("q", "quiet"))
    assert (quiet.reward, quiet.errors) == (None, [])
    (error,) = (await agents.play(order("d", "die"))).errors
    assert "ended with status 1: out of luck" in error


async def test_an_agent_whose_episode_was_given_up_is_killed() -> None:
    command = script("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await OnceAgents(command).play(order("e", 1))
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)


@pytest.mark.parametrize(("text", "kind"), [(LINES, LineAgents), (ONCE, OnceAgents)])
async def test_auto_finds_out_with_the_first_episode(text: str, kind: type[Agents]) -> None:
    agents = AutoAgents(script(text), 2)
    reports = await asyncio.gather(*(agents.play(order(f"e{n}", n)) for n in range(3)))
    assert [r.reward for r in reports] == [0.0, 0.1, 0.2]
    assert isinstance(agents._agents, kind)
    await agents.close()


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ValueError, match="known are auto, once, lines"):
        make_agents("agent", "twice", 1)
    with pytest.raises(ValueError, match="--agent is empty"):
        make_agents(" ", "auto", 1)


async def test_the_pace_bounds_how_many_begin() -> None:
    clock = asyncio.get_running_loop().time
    pace, begun = Pace(50), clock()
    await asyncio.gather(*(pace.turn() for _ in range(11)))
    assert 0.2 <= clock() - begun < 0.6
    begun = clock()
    await asyncio.gather(*(Pace(0).turn() for _ in range(1000)))
    assert clock() - begun < 0.5
