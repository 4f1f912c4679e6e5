"""Giving way to other processes when the cores are full.

Invariant: it changes an order of service and nothing else; where a system does not allow it,
nothing happens.

On one machine the arithmetic (replicas, trainer) would take every core from the processes that
carry a reward to a step and a step to its weights. Each of those needs milliseconds.
"""

import contextlib
import os
from pathlib import Path

REPLICA, TRAINER = 10, 1
"""A step is short and waited for; the loop's own work goes before both."""


def stand_back(niceness: int) -> None:
    """Lower the priority of this process; on Linux also that of its session's group."""
    os.nice(niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))
