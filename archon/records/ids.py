"""Ids and time as values that are passed in, so that tests can give their own.

Invariant: ids of one kind sort by the time of their making (48 bits of milliseconds, then random).
"""

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]
IdSource = Callable[[str], str]


def system_clock() -> datetime:
    """The present time, aware, UTC."""
    return datetime.now(UTC)


def random_id(prefix: str) -> str:
    """A new id such as ``ses_0198c0de1f2a7c3b9d0e4f5a``: 12 hex digits of time, 12 random."""
    return f"{prefix}_{time.time_ns() // 1_000_000:012x}{os.urandom(6).hex()}"


SESSION, GROUP, INTERACTION, REWARD = "ses", "grp", "int", "rew"
SAMPLE, MANIFEST, OUTBOX, REPLICA = "smp", "man", "out", "rep"
