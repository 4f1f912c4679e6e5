"""``archon status``: what runs, and what each policy has learned so far."""

import json
import os
import time
from typing import Any

from archon.settings import Settings
from archon.stack.state import holder, read_state

_VERSIONS = """
SELECT policy_id, max(version) FILTER (WHERE state NOT IN ('rejected', 'rolled_back')),
       max(version) FILTER (WHERE state = 'live')
FROM policy_version WHERE tenant_id = %s GROUP BY policy_id ORDER BY policy_id
"""


def show(settings: Settings, as_json: bool) -> int:
    """Print it; 0 where every process is ready, else 1."""
    report = collect(settings)
    if as_json:
        print(json.dumps(report, indent=1, sort_keys=True))
    else:
        _print(report)
    healthy = report["running"] and report["status"] == "ready"
    return 0 if healthy and all(_is_ready(p) for p in report["processes"].values()) else 1


def collect(settings: Settings) -> dict[str, Any]:
    """The supervisor's state, believed only while its lock is held."""
    state = read_state(settings.run_dir)
    pid = holder(settings.run_dir)
    if pid is None:
        return {"running": False, "status": "stopped", "processes": {},
                "data_dir": str(settings.data_dir.absolute())}  # fmt: skip
    for process in state.get("processes", {}).values():
        if process["pid"] is not None and not _alive(process["pid"]):
            process["state"] = "down"
    return {
        **state,
        "running": True,
        "data_dir": str(settings.data_dir.absolute()),
        "policies": _policies(settings, state),
    }


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_ready(process: dict[str, Any]) -> bool:
    return bool(process["state"] == "ready")


def _policies(settings: Settings, state: dict[str, Any]) -> dict[str, Any]:
    """Head and live version by policy; empty while PostgreSQL does not answer."""
    import psycopg

    url = _postgres_url(settings)
    if url is None or state.get("status") == "starting":
        return {}
    try:
        with psycopg.connect(url, connect_timeout=2) as connection:
            rows = connection.execute(_VERSIONS, (settings.tenant,)).fetchall()
    except psycopg.Error:
        return {}
    return {policy: {"head": head, "live": live} for policy, head, live in rows}


def _postgres_url(settings: Settings) -> str | None:
    if settings.postgres.url is not None:
        return settings.postgres.url.get_secret_value()
    from archon.stack.postgres import existing_url

    return existing_url(
        settings.data_dir.absolute() / "postgres", settings.secrets_dir / "postgres.password"
    )


def _print(report: dict[str, Any]) -> None:
    if not report["running"]:
        print(f"Archon is not running on {report['data_dir']}. Start it with `archon up`.")
        return
    print(f"Archon on {report['data_dir']}: {report['status']}\n")
    print(f"  gateway      {report['gateway']}/v1")
    if report["temporal_ui"]:
        print(f"  Temporal UI  {report['temporal_ui']}")
    print()
    now = time.time()
    names = report["processes"]
    width = max(map(len, names), default=0)
    for name, process in names.items():
        age = f"{now - process['started_at']:.0f} s" if process["pid"] else "-"
        print(
            f"  {name:{width}}  {process['state']:8}  pid {process['pid'] or '-'!s:>7}  "
            f"up {age:>8}  restarts {process['restarts']}"
        )
    for policy, versions in report["policies"].items():
        print(f"\n  policy {policy}: head v{versions['head']}, live v{versions['live']}")
