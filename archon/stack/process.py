"""How one child process is started: as whom, with what, and what it gets when its parent dies.

Invariant: no child outlives its parent. On Linux the kernel sends ``death_signal``; elsewhere the
child runs under :mod:`archon.stack.leash`, which watches a pipe that only the parent holds open.
"""

import ctypes
import os
import pwd
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the top-level packages."""

_PR_SET_PDEATHSIG = 1
_SERVICE_USERS = ("postgres", "_postgres", "nobody")


@dataclass(frozen=True)
class ServiceUser:
    """An unprivileged user that exists on this machine."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True)
class Spec:
    """One process of the stack. ``env`` is added to the environment of the parent."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    user: ServiceUser | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    stop_timeout: float = 6.0


def service_user() -> ServiceUser | None:
    """Whom PostgreSQL runs as: None is ourselves; as root, an unprivileged user that exists."""
    if os.geteuid() != 0:
        return None
    for name in _SERVICE_USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return ServiceUser(name, entry.pw_uid, entry.pw_gid)
    raise LookupError(f"none of the users {', '.join(_SERVICE_USERS)} exists")


def python(module: str, *args: str) -> tuple[str, ...]:
    """``python -m module``; ``-P`` keeps folders of the working folder from hiding our packages."""
    return (sys.executable, "-P", "-m", module, *args)


def environment() -> dict[str, str]:
    """Ours, with our packages on Python's path wherever the child is started."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def popen_arguments(spec: Spec, output: int) -> dict[str, Any]:
    """Keyword arguments for ``subprocess.Popen`` and ``asyncio.create_subprocess_exec``.

    A session of its own keeps the terminal's Ctrl-C for the supervisor.
    """
    arguments: dict[str, Any] = {
        "stdin": -3 if _on_linux() else -1,
        "stdout": output,
        "stderr": output,
        "env": {**environment(), **spec.env},
        "start_new_session": True,
    }
    if spec.user is not None:
        arguments |= {"user": spec.user.uid, "group": spec.user.gid, "extra_groups": []}
    if _on_linux():
        arguments["preexec_fn"] = _die_with_parent(os.getpid(), spec.death_signal)
    return arguments


def command_line(spec: Spec) -> tuple[str, ...]:
    """The command as it is executed here."""
    if _on_linux():
        return spec.command
    return python("archon.stack.leash", str(int(spec.death_signal)), *spec.command)


def _on_linux() -> bool:
    return sys.platform.startswith("linux")


def _die_with_parent(parent: int, signum: signal.Signals) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def apply() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return apply
