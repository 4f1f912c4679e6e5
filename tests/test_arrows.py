"""The arrows between the rooms: who may import whom, read from the source of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"archon", "engine", "gateway", "workflows", "activities", "migrations"}
FLOOR = {"archon.records", "archon.settings", "archon.storage", "archon.codec", "archon.inference",
         "archon.failpoints", "archon.standing_back", "archon"}  # fmt: skip
MAY_IMPORT: dict[str, set[str]] = {
    "archon.records": {"archon.records"},
    "archon.failpoints": set(),
    "archon.standing_back": set(),
    "archon.settings": FLOOR,
    "archon.storage": FLOOR,
    "archon.codec": FLOOR,
    "archon.inference": FLOOR,
    "engine": FLOOR | {"engine"},
    "gateway": FLOOR | {"gateway"},
    "workflows": {"archon.records", "workflows"},
    "activities": FLOOR | {"activities"},
}
# The worker's main names the workflows that it runs.
EXCEPTIONS = {("activities.worker", "workflows"), ("activities.trainer", "engine")}
FORBIDDEN = {
    "torch": {"archon", "gateway", "workflows", "activities"},
    "temporalio": {"engine", "gateway", "archon.records", "archon.storage", "archon.codec",
                   "archon.inference", "archon.settings"},
    "sqlalchemy": {"engine", "workflows"},
    "psycopg": {"engine", "workflows"},
    "transformers": OURS,
}  # fmt: skip


def modules() -> list[tuple[str, Path]]:
    found = []
    for top in sorted(OURS - {"migrations"}):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: str(value))
def test_a_module_imports_only_what_its_room_may(module: str, path: Path) -> None:
    room = next((r for r in sorted(MAY_IMPORT, key=len, reverse=True) if within(module, r)), None)
    for name in imports(path):
        top = name.split(".")[0]
        for package, rooms in FORBIDDEN.items():
            if top == package:
                assert not any(within(module, r) for r in rooms), f"{module} imports {name}"
        if room is None or top not in OURS:
            continue
        allowed = any(within(name, a) for a in MAY_IMPORT[room] - {"archon"}) or name == "archon"
        # `from archon import records` yields both names; the package itself is always there.
        excepted = any(within(module, m) and within(name, n) for m, n in EXCEPTIONS)
        assert allowed or excepted or name == "archon.__version__", f"{module} imports {name}"


def test_the_records_need_only_the_standard_library() -> None:
    import sys

    for module, path in modules():
        if within(module, "archon.records"):
            for name in imports(path):
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or top == "archon", f"{module}: {name}"
