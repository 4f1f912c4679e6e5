"""A whole installation as a user starts it, for the tests that start, kill and end it."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from archon.stack.process import environment

BACK_S = 15.0
"""Within this every process must be back after a kill, in seconds."""


@dataclass
class Installation:
    """``archon up`` in a folder of its own."""

    folder: Path
    started: subprocess.CompletedProcess[str] | None = None
    process: subprocess.Popen[str] | None = None

    @property
    def printed(self) -> str:
        assert self.started is not None
        assert self.started.returncode == 0, self.started.stderr
        return self.started.stdout

    def archon(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "archon.cli", *arguments],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def up(self) -> None:
        """Start in the foreground and wait until it is ready."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "archon.cli", "up"],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.rstrip())
            if line.startswith("Ctrl-C"):
                return
        pytest.fail("it did not start:\n" + "\n".join(lines))

    def state(self) -> dict[str, Any]:
        text = (self.folder / ".archon" / "run" / "state.json").read_text()
        state: dict[str, Any] = json.loads(text)
        return state

    def is_ready(self) -> bool:
        return all(p["state"] == "ready" for p in self.state()["processes"].values())


def until(condition: Callable[[], bool], timeout: float, what: str) -> float:
    """Wait for a condition; the seconds that it took. A failed test after ``timeout``."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > timeout:
            pytest.fail(f"not within {timeout} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - begun


def is_gone(pid: int) -> bool:
    """Ended, or a zombie that only its parent can take away."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
