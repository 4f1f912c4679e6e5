"""One seed of the demo: a policy that knows nothing learns through the whole of Archon."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.stack import short_folder

pytestmark = [pytest.mark.demo, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 36


def test_it_learns_and_breaks_nothing() -> None:
    """The demo itself judges: reward before and after, changes of weights, errors, invariants."""
    with short_folder() as folder:
        command = [sys.executable, "-m", "examples.number_game.demo", "--seeds", "1",
                   "--steps", str(STEPS), "--folder", str(folder)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(done.stdout[-4000:])
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert "learned" in done.stdout
        assert (folder / "rewards.png").stat().st_size > 10_000
