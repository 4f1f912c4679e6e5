"""Named points at which a test can make this process die, exactly and not by timing.

Invariant: without ``ARCHON_FAILPOINTS`` in the environment a failpoint does nothing.

``ARCHON_FAILPOINTS="gateway.after_row=kill;trainer.before_publish=kill@3;relay.after_signal=sleep:2"``:
``kill`` ends the process with SIGKILL, ``error`` raises :class:`FailpointError`, ``sleep:S`` blocks
the thread for S seconds; ``@N`` acts at the N-th passage only. With ``ARCHON_FAILPOINT_DIR`` set, a
``kill`` fires once per name over all processes and restarts (a marker file is left there), so that
the process that takes over passes.
"""

import os
import signal
import time
from pathlib import Path

_passages: dict[str, int] = {}


class FailpointError(RuntimeError):
    """Raised at a failpoint whose action is ``error``."""


def _plan() -> dict[str, tuple[str, int]]:
    plan: dict[str, tuple[str, int]] = {}
    for item in os.environ.get("ARCHON_FAILPOINTS", "").split(";"):
        if not item.strip():
            continue
        name, _, action = item.strip().partition("=")
        action, _, nth = action.partition("@")
        if action not in ("kill", "error") and not action.startswith("sleep:"):
            raise ValueError(f"ARCHON_FAILPOINTS: unknown action {action!r} for {name!r}")
        plan[name] = (action, int(nth or 1))
    return plan


_PLAN = _plan()


def failpoint(name: str) -> None:
    """Act out what ``ARCHON_FAILPOINTS`` says for ``name``; return at once where it is silent."""
    if name not in _PLAN:
        return
    action, nth = _PLAN[name]
    _passages[name] = _passages.get(name, 0) + 1
    if _passages[name] != nth:
        return
    if action == "error":
        raise FailpointError(f"failpoint {name}")
    if action.startswith("sleep:"):
        time.sleep(float(action.removeprefix("sleep:")))
        return
    if directory := os.environ.get("ARCHON_FAILPOINT_DIR"):
        try:
            (Path(directory) / f"{name}.fired").touch(exist_ok=False)
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
