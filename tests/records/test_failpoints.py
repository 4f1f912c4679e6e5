"""A failpoint acts only where the environment says so, at the passage named, once per folder."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from archon.failpoints import failpoint
for passage in range(4):
    failpoint("here")
    print(passage, flush=True)
"""


def run(plan: str, directory: Path | None = None) -> tuple[int, list[str]]:
    env = {**os.environ, "ARCHON_FAILPOINTS": plan}
    if directory:
        env["ARCHON_FAILPOINT_DIR"] = str(directory)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout.split()


def test_without_a_plan_nothing_happens() -> None:
    assert run("") == (0, ["0", "1", "2", "3"])
    assert run("elsewhere=kill") == (0, ["0", "1", "2", "3"])


def test_it_kills_at_the_passage_named() -> None:
    assert run("here=kill@3") == (-9, ["0", "1"])


def test_it_kills_once_per_folder_so_that_the_next_process_passes(tmp_path: Path) -> None:
    assert run("here=kill", tmp_path)[0] == -9
    assert run("here=kill", tmp_path) == (0, ["0", "1", "2", "3"])


def test_an_unknown_action_is_refused() -> None:
    assert run("here=explode")[0] == 1
