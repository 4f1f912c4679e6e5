"""Children that never outlive their parent.

Invariant: a child has a process group of its own and is killed by the kernel when the process
that started it dies, however it dies; where the kernel cannot, the end of its stdin tells it.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: nothing may be imported between fork and exec.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_LINE_LIMIT = 1 << 24


def _die_with(parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


async def start_child(
    command: Sequence[str], env: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start ``command`` with pipes on stdin, stdout and stderr; ``env`` is added to ours."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
        limit=_LINE_LIMIT,
        start_new_session=True,
        preexec_fn=_die_with(os.getpid()),
    )


async def kill_child(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to the child's whole group, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
