"""The demo: an agent learns a game while it plays, through the whole of Archon.

    python -m examples.number_game.demo --seeds 1 2 3

For each seed: a fresh installation in ``.archon-demo/seed-N``, an untrained policy, ``archon up``,
``archon rollout`` with a plain agent, and weights that change under it. It ends with a table, a
plot, and a check of every invariant. Exit status 1: a seed did not learn, an agent saw an error, or
an invariant is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from archon.stack import database_url
from examples.number_game import curves, plots
from examples.number_game.settings import CONFIG, EPISODES_PER_SECOND, STEPS, tasks
from tests.kit.invariants import check_invariants

HERE = Path(__file__).resolve().parent
FIRST, LAST = 320, 640
BEFORE, AFTER, CHANGES = 0.2, 0.5, 10
TIME_LIMIT = 600.0


@dataclass
class Outcome:
    """What one seed did. ``problems`` is empty when it did all that it should."""

    seed: int
    curves: curves.Curves
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def archon(config: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "archon.cli", *words]


def prepare(folder: Path, seed: int, groups: int) -> Path:
    """A fresh installation: the policy's model, the tasks, the settings. Returns the settings."""
    from examples.number_game.model import write_policy

    if (folder / "run").exists():
        call(folder / "archon.toml", "down", check=False)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_policy(folder / "model", seed)
    with (folder / "tasks.jsonl").open("w") as lines:
        for number, task in enumerate(tasks(groups, seed)):
            lines.write(json.dumps({"task_id": f"number-{number}", **task}) + "\n")
    config = folder / "archon.toml"
    config.write_text(CONFIG.format(data_dir=folder.absolute(), model=folder.absolute() / "model"))
    return config


def environment(config: Path) -> dict[str, str]:
    return {**os.environ, "ARCHON_CONFIG": str(config)}


def call(config: Path, *words: str, check: bool = True) -> None:
    """Run one ``archon`` command to its end; its output is shown only where it failed."""
    done = subprocess.run(
        archon(config, *words), env=environment(config), capture_output=True, text=True
    )
    if check and done.returncode:
        raise SystemExit(f"archon {' '.join(words)} failed:\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def stack(config: Path) -> Iterator[None]:
    """``archon up`` around the block."""
    call(config, "up", "--detach")
    try:
        yield
    finally:
        call(config, "down", check=False)


@contextlib.contextmanager
def agents(config: Path, seed: int) -> Iterator[subprocess.Popen[str]]:
    """``archon rollout`` around the block; stopped when the block ends."""
    folder = config.parent
    words = [
        "rollout", "--tasks", str(folder / "tasks.jsonl"), "--group-size", "8",
        "--agent", f"{sys.executable} {HERE / 'agent.py'}", "--agent-mode", "lines",
        "--agents", "1", "--rate", str(EPISODES_PER_SECOND), "--run-id", f"demo-{seed}",
    ]  # fmt: skip
    with (folder / "rollout.log").open("w") as log:
        process = subprocess.Popen(
            archon(config, *words), env=environment(config), stdout=log, stderr=log, text=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def progress(seed: int, started: float, seen: curves.Curves, steps: int) -> Text:
    """One line: how far, how fast, how good."""
    spent = time.monotonic() - started
    recent = seen.mean(slice(-LAST // 2, None))
    bar = "█" * round(20 * min(1.0, seen.steps / steps))
    return Text(
        f"seed {seed}  {bar:░<20}  version {seen.steps:3d}/{steps}  live {seen.live:3d}  "
        f"episodes {len(seen.rewards):5d} ({len(seen.rewards) / spent:4.1f}/s)  "
        f"reward {recent:.2f}  {spent:4.0f} s",
        no_wrap=True,
    )


def watch(config: Path, process: subprocess.Popen[str], seed: int, steps: int) -> list[str]:
    """Show progress until ``steps`` are committed; returns what went wrong on the way."""
    url, started = database_url(config.parent), time.monotonic()
    console = Console()
    with Live(console=console, refresh_per_second=4, transient=False) as live:
        while True:
            time.sleep(1.0)
            seen = curves.read(url)
            live.update(progress(seed, started, seen, steps))
            if seen.steps >= steps:
                return []
            if process.poll() is not None:
                tail = (config.parent / "rollout.log").read_text()[-2000:]
                return [f"the agents ended early (exit {process.returncode}):\n{tail}"]
            if time.monotonic() - started > TIME_LIMIT:
                return [f"{seen.steps} of {steps} steps in {TIME_LIMIT:.0f} s; see `archon status`"]


def agent_errors(folder: Path) -> list[str]:
    """What the agents saw go wrong: the rollout's own record of its members."""
    path = folder / "run" / "rollouts" / f"demo-{folder.name.removeprefix('seed-')}.jsonl"
    if not path.exists():
        return [f"the rollout left no record at {path}"]
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    return [f"{e['episode']}: {error}" for e in episodes for error in e["errors"]]


def judge(outcome: Outcome) -> None:
    """Hold a finished run against what the demo promises."""
    seen = outcome.curves
    first, last = seen.mean(slice(0, FIRST)), seen.mean(slice(-LAST, None))
    if not first <= BEFORE:
        outcome.problems.append(f"mean reward of the first {FIRST} is {first:.2f}, not ≤ {BEFORE}")
    if not last >= AFTER:
        outcome.problems.append(f"mean reward of the last {LAST} is {last:.2f}, not ≥ {AFTER}")
    if seen.live < CHANGES:
        outcome.problems.append(f"only {seen.live} weight changes went live, not {CHANGES}")


def play(seed: int, root: Path, steps: int) -> Outcome:
    """One seed from nothing to a verdict."""
    started = time.monotonic()
    config = prepare(root / f"seed-{seed}", seed, groups=12 * steps)
    with stack(config):
        with agents(config, seed) as process:
            problems = watch(config, process, seed, steps)
        outcome = Outcome(seed, curves.read(database_url(config.parent)), problems=problems)
        outcome.problems += [str(v) for v in check_invariants(config.parent)]
    outcome.problems += agent_errors(config.parent)[:10]
    outcome.seconds = time.monotonic() - started
    judge(outcome)
    return outcome


def report(outcomes: list[Outcome], root: Path) -> None:
    """The table, the plots, and where to look."""
    table = Table(title="Number game", padding=0, box=box.SIMPLE)
    for name in ("seed", "steps", "episodes", f"first {FIRST}", f"last {LAST}", "stale",
                 "dropped", "time", ""):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for o in outcomes:
        stale = o.curves.staleness
        table.add_row(
            str(o.seed), str(o.curves.steps), str(len(o.curves.rewards)),
            f"{o.curves.mean(slice(0, FIRST)):.2f}", f"{o.curves.mean(slice(-LAST, None)):.2f}",
            f"{sum(stale) / max(1, len(stale)):.2f}", str(sum(o.curves.dropped.values())),
            f"{o.seconds:.0f} s", "learned" if not o.problems else "FAILED",
        )  # fmt: skip
    console = Console()
    runs = {o.seed: o.curves for o in outcomes}
    plots.show_in_terminal(runs)
    console.print(table)
    for o in outcomes:
        for problem in o.problems:
            console.print(f"[red]seed {o.seed}:[/] {problem}", highlight=False)
    plots.save_png(runs, root / "rewards.png")
    config = root / f"seed-{outcomes[-1].seed}" / "archon.toml"
    console.print(f"Picture: {root / 'rewards.png'}")
    console.print(f"Look around: ARCHON_CONFIG={config} .venv/bin/archon up", soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="one run for each")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(".archon-demo"), help="where it all goes"
    )
    arguments = parser.parse_args()
    outcomes = []
    for seed in arguments.seeds:
        outcomes.append(play(seed, arguments.folder, arguments.steps))
    report(outcomes, arguments.folder)
    return int(any(o.problems for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
