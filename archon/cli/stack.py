"""``archon up``, ``down`` and ``logs``."""

import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

from archon.settings import Settings
from archon.stack.errors import StackError
from archon.stack.logs import Follower, last_lines, log_file
from archon.stack.plan import Plan, check, flags_as_environment, make_folders
from archon.stack.process import environment, python
from archon.stack.state import holder, read_state

_DETACHED_TIMEOUT_S = 200.0


def up(settings: Settings, flags: dict[str, Any], detach: bool) -> None:
    """Run the stack here until a signal; with ``detach`` in the background, once it is ready."""
    if detach:
        _up_detached(settings, flags)
        return
    from archon.stack.supervisor import up as run_stack

    check(settings)
    begun = time.monotonic()

    def ready(plan: Plan) -> None:
        _print(f"ready in {time.monotonic() - begun:.1f} s\n")
        _print_addresses(
            plan.gateway_url, plan.temporal_ui, list(settings.policies), str(plan.data_dir)
        )
        _print("Ctrl-C ends it in order.")

    _print(f"starting Archon in {settings.data_dir.absolute()} …")
    run_stack(settings, flags, _say, ready)
    _print("stopped")


def _say(text: str) -> None:
    _print(f"{datetime.now():%H:%M:%S} {text}")


def _print(text: str) -> None:
    print(text, flush=True)


def _print_addresses(gateway: str, ui: str, policies: list[str], data_dir: str) -> None:
    _print(f"  gateway      {gateway}/v1")
    if ui:
        _print(f"  Temporal UI  {ui}")
    _print(f"  admin key    in {data_dir}/secrets/admin.key")
    if not policies:
        _print("  no policy yet: `archon init` writes a settings file that names one")
    _print("")


def _up_detached(settings: Settings, flags: dict[str, Any]) -> None:
    check(settings)
    make_folders(settings)
    run_dir = settings.run_dir
    if pid := holder(run_dir):
        raise StackError(
            f"Archon is already running on {settings.data_dir.absolute()} (pid {pid}). "
            "See `archon status`; stop it with `archon down`."
        )
    log = log_file(settings.data_dir.absolute() / "logs", "supervisor")
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            python("archon.cli", "up"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**environment(), **flags_as_environment(flags)},
        )
    deadline = time.monotonic() + _DETACHED_TIMEOUT_S
    while time.monotonic() < deadline:
        state = read_state(run_dir)
        if state.get("status") == "ready" and state.get("supervisor") == process.pid:
            _print_addresses(
                state["gateway"], state["temporal_ui"], list(settings.policies),
                str(settings.data_dir.absolute()),
            )  # fmt: skip
            return
        if process.poll() is not None:
            said = log.read_bytes()[begin:].decode(errors="replace").strip()
            raise StackError(said.rpartition("error: ")[2] or "the start failed without a word")
        time.sleep(0.05)
    raise StackError(f"not ready after {_DETACHED_TIMEOUT_S:.0f} s. See `archon logs supervisor`.")


def down(settings: Settings, timeout: float) -> None:
    """Ask the supervisor to end everything, and wait until it has."""
    run_dir = settings.run_dir
    pid = holder(run_dir)
    if pid is None:
        raise StackError(f"Archon is not running on {settings.data_dir.absolute()}.")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while holder(run_dir) == pid:
        if time.monotonic() > deadline:
            raise StackError(
                f"the supervisor (pid {pid}) has not ended after {timeout:.0f} s. Wait, or end it "
                f"with `kill -9 {pid}`: nothing that was acknowledged is lost."
            )
        time.sleep(0.05)
    _print("stopped")


def logs(settings: Settings, name: str | None, follow: bool, lines: int) -> None:
    """Print the last lines of one process, or of all; with ``follow`` go on."""
    folder = settings.data_dir.absolute() / "logs"
    known = sorted(path.stem for path in folder.glob("*.log"))
    if not known:
        raise StackError(f"there are no logs in {folder}: Archon has not run there yet.")
    if name is not None and name not in known:
        raise StackError(f"no process {name!r} has a log; there are {', '.join(known)}.")
    chosen = [name] if name is not None else known
    width = max(map(len, chosen)) if len(chosen) > 1 else 0
    follower = Follower([log_file(folder, each) for each in chosen])
    for each in chosen:
        for line in last_lines(log_file(folder, each), lines if name else max(1, lines // 5)):
            _print(f"{each:{width}}  {line}" if width else line)
    while follow:
        for each, line in follower.new_lines():
            _print(f"{each:{width}}  {line}" if width else line)
        sys.stdout.flush()
        time.sleep(0.2)
