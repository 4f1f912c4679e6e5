"""What a running stack tells others: its lock, its state, and the ports that it keeps.

Invariant: at most one supervisor runs on a data folder. The lock is the kernel's (flock), so it
ends with its holder however that dies; no pid is ever believed without it.
"""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from archon.stack.errors import StackError
from archon.stack.files import write_file

_LOOK_S = 0.3
"""How long a look at the lock (:func:`holder`) may stand in the way of taking it."""


class Lock:
    """Held by the supervisor of a data folder, with its pid written inside."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "supervisor.lock"
        self._descriptor = -1

    def take(self) -> None:
        """StackError where another supervisor has it."""
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + _LOOK_S
        while not _locked(self._descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                pid = self.path.read_text().strip() or "?"
                os.close(self._descriptor)
                raise StackError(
                    f"Archon is already running on {self.path.parents[1]} (pid {pid}). "
                    "See `archon status`; stop it with `archon down`."
                )
            time.sleep(0.02)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def holder(run_dir: Path) -> int | None:
    """The pid of the supervisor that runs on this folder, None where there is none."""
    try:
        descriptor = os.open(run_dir / "supervisor.lock", os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        if _locked(descriptor, fcntl.LOCK_SH):
            return None
        text = os.pread(descriptor, 32, 0).decode().strip()
        return int(text) if text else None
    finally:
        os.close(descriptor)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_state(run_dir: Path) -> dict[str, Any]:
    """``state.json``; empty where there is none."""
    try:
        state: dict[str, Any] = json.loads((run_dir / "state.json").read_text())
    except FileNotFoundError:
        return {}
    return state


def ended_unclean(run_dir: Path) -> bool:
    """Whether the last supervisor was killed, so that its children may just be ending."""
    return bool(read_state(run_dir).get("status", "stopped") != "stopped")


def write_state(run_dir: Path, state: dict[str, Any]) -> None:
    write_file(run_dir / "state.json", json.dumps(state, indent=1, sort_keys=True) + "\n")


class Ports:
    """Ports by name. What was picked once is taken again after a restart, if it is still free."""

    def __init__(self, run_dir: Path, patience: float = 0.0) -> None:
        """``patience``: how many seconds a taken port may still be on its way to being free."""
        self._file, self._patience = run_dir / "ports.json", patience
        self._kept: dict[str, int] = {}
        if self._file.exists():
            self._kept = json.loads(self._file.read_text())
        self._given: set[int] = set()

    def fixed(self, name: str, host: str, port: int, setting: str) -> int:
        """``port``, which must be free; 0 is any. ``setting`` is named in the error."""
        if port == 0:
            return self.any(name)
        if port in self._given or not self._soon_free(host, port):
            variable = "ARCHON_" + setting.upper().replace(".", "__")
            raise StackError(
                f"port {port} for {name} is taken. Set {setting} (or {variable}) to another, "
                "or to 0 for a free one."
            )
        self._given.add(port)
        return port

    def any(self, name: str) -> int:
        """The port kept for ``name`` if it is free, else a free one."""
        port = self._kept.get(name, 0)
        if not port or port in self._given or not is_free("127.0.0.1", port):
            port = self._pick()
        self._given.add(port)
        self._kept[name] = port
        write_file(self._file, json.dumps(self._kept, indent=1, sort_keys=True) + "\n")
        return port

    def _soon_free(self, host: str, port: int) -> bool:
        deadline = time.monotonic() + self._patience
        while not is_free(host, port):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _pick(self) -> int:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in self._given:
                return port


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
