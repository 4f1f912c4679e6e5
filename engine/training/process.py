"""The trainer as a process: JSON lines in, JSON lines out, one operation at a time.

It lives no longer than its parent: it ends when stdin ends, and within a second where the parent
has died while an operation runs. Nothing but answers goes to stdout.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from engine.training.trainer import Trainer

OPERATIONS = {
    "init": ("model", "out", "attempt"),
    "step": ("manifest", "batch", "base", "out", "attempt"),
}


def serve(trainer: Trainer, requests: TextIO, answers: TextIO) -> None:
    def say(event: dict[str, Any]) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    say({"event": "ready"})
    for line in requests:
        if line.strip():
            say(answer(trainer, line, say))


def answer(trainer: Trainer, line: str, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    try:
        operation, fields = _parse(line)
        if operation == "init":
            return trainer.init(**fields)
        return trainer.step(
            **fields,
            progress=lambda span, done, total: say(
                {"event": "progress", "span": span, "done": done, "total": total}
            ),
        )
    except Exception as error:  # noqa: BLE001 - every failure becomes an answer
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return {
            "event": "error",
            "retryable": not isinstance(error, (ValueError, AssertionError, TypeError, KeyError)),
            "type": type(error).__name__,
            "message": str(error),
        }


def _parse(line: str) -> tuple[str, dict[str, str]]:
    fields = json.loads(line)
    operation = fields.pop("op", None)
    if operation not in OPERATIONS:
        raise ValueError(f"unknown op {operation!r}: one of {', '.join(OPERATIONS)}")
    wanted = OPERATIONS[operation]
    if set(fields) != set(wanted):
        raise ValueError(f"op {operation}: fields {sorted(fields)}, not {sorted(wanted)}")
    return operation, fields


def end_with_parent(interval: float = 0.5) -> None:
    """Polling, and not a signal of the kernel: that one fires when the forking *thread* ends."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def refuse_more_ranks() -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != 1:
        raise ValueError(f"WORLD_SIZE {world}: the trainer runs as one process, set it to 1")
