"""Every process is killed once, with SIGKILL, under agents that play and weights that change.

At the end everything that was acknowledged is there, nothing was trained twice, there is one
version per committed step, and the run went on.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from archon.stack import database_url
from tests.kill.players import Ledger, Player
from tests.kit.installation import BACK_S, Installation, until
from tests.kit.invariants import check_invariants
from tests.kit.policies import tiny_policy
from tests.kit.stack import short_folder

pytestmark = [pytest.mark.stack, pytest.mark.kill, pytest.mark.timeout(600)]

PROCESSES = ["gateway", "worker", "trainer", "rep_embedded_game_0", "temporal", "postgres"]
CONFIG = """
[gateway]
port = 0
[temporal]
port = 0
ui_port = 0
[policies.game]
model = "model"
max_tokens = 1
max_model_len = 64
batch_groups = 4
close_grace = 0.2
idle_timeout = 20
reward_timeout = 5
late_window = 0
group_timeout = 30
"""


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    """``archon up`` whose engine dies once, in the middle of its third step of four epochs each."""
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        tiny_policy(folder / "model")
        (folder / "archon.toml").write_text(CONFIG)
        (folder / "fired").mkdir(mode=0o777)
        patch.setenv("ARCHON_FAILPOINTS", "trainer.mid_step=kill@10")
        patch.setenv("ARCHON_FAILPOINT_DIR", str(folder / "fired"))
        made = Installation(folder)
        made.up()
        try:
            yield made
        finally:
            made.archon("down")


class Database:
    """What the test itself asks of Postgres; it must not mind that this dies too."""

    def __init__(self, data_dir: Path) -> None:
        self._url = database_url(data_dir)

    def ask(self, query: str) -> int:
        deadline = time.monotonic() + 30
        while True:
            try:
                with psycopg.connect(self._url, connect_timeout=2) as connection:
                    row = connection.execute(query).fetchone()
                    return int(row[0]) if row else 0
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def steps(self) -> int:
        return self.ask("SELECT count(*) FROM policy_version WHERE version > 0")

    def training(self) -> int:
        return self.ask("SELECT count(*) FROM batch_manifest WHERE state = 'claimed'")


def kill(installation: Installation, name: str) -> float:
    """Kill it; the seconds until another process is ready in its place."""
    before = installation.state()["processes"][name]["pid"]
    os.kill(before, signal.SIGKILL)
    begun = time.monotonic()

    def back() -> bool:
        now = installation.state()["processes"][name]
        return now["pid"] not in (None, before) and now["state"] == "ready"

    until(back, BACK_S, f"{name} back after a kill")
    return time.monotonic() - begun


def test_nothing_is_lost_whatever_is_killed(installation: Installation) -> None:
    data_dir = installation.folder / ".archon"
    admin_key = (data_dir / "secrets" / "admin.key").read_text().strip()
    database, ledger = Database(data_dir), Ledger()
    address = installation.state()["gateway"]  # a port is kept over restarts
    players = [Player(address, admin_key, "game", ledger, seed) for seed in range(6)]
    for player in players:
        player.start()
    fired = installation.folder / "fired" / "trainer.mid_step.fired"
    until(lambda: database.steps() >= 3, 120, "three steps, the third after the engine's death")
    assert fired.exists(), "the engine was not killed in the middle of its step"

    back: dict[str, float] = {}
    for name in PROCESSES:
        before = database.steps()
        if name == "trainer":
            until(lambda: database.training() == 1, 60, "a step that runs")
        back[name] = kill(installation, name)
        until(lambda before=before: database.steps() > before, 90, f"a step after {name} died")  # type: ignore[misc]
    print(f"back after, in seconds: {back}; refusals: {dict(ledger.refusals)}")

    for player in players:
        player.stop.set()
    for player in players:
        player.join(60)
    assert not any(player.is_alive() for player in players)
    until(lambda: database.ask("SELECT count(*) FROM outbox WHERE sent_at IS NULL") == 0, 30,
          "everything that was acknowledged told to Temporal")  # fmt: skip
    assert ledger.wrong == []
    assert len(ledger.acknowledged.interactions) > 100
    assert len(ledger.acknowledged.rewards) > 50
    assert check_invariants(data_dir, ledger.acknowledged) == []
    committed = database.ask("SELECT count(*) FROM batch_manifest WHERE state = 'committed'")
    assert committed == database.steps() >= 3 + len(PROCESSES)
