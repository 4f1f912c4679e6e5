"""``archon up`` as a user meets it: started, asked, killed in every part, ended."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.kit.installation import BACK_S, Installation, is_gone, until
from tests.kit.stack import short_folder

pytestmark = [pytest.mark.stack, pytest.mark.kill, pytest.mark.timeout(300)]

NAMES = {
    "postgres", "temporal", "gateway", "worker", "trainer",
    "rep_embedded_game_0", "rep_embedded_game_1",
}  # fmt: skip


@pytest.fixture(scope="module")
def stack() -> Iterator[Installation]:
    from tests.kit.policies import tiny_policy

    with short_folder() as folder:
        tiny_policy(folder / "model")
        (folder / "archon.toml").write_text(
            "[gateway]\nport = 0\n[temporal]\nport = 0\nui_port = 0\n"
            '[policies.game]\nmodel = "model"\nmax_model_len = 64\nbatch_groups = 2\n'
        )
        made = Installation(folder)
        try:
            made.started = made.archon("up", "--detach")
            yield made
        finally:
            made.archon("down")


def play(stack: Installation, timeout: float = 30) -> str:
    """One session with one call and one reward, by the command line; its id."""
    started = stack.archon("session", "start", "--policy", "game", "--json")
    assert started.returncode == 0, started.stderr
    session = json.loads(started.stdout)
    body = {
        "model": "game",
        "messages": [{"role": "user", "content": "guess"}],
        "max_tokens": 1,
    }
    headers = {"authorization": f"Bearer {session['api_key']}"}
    answers: list[httpx.Response] = []

    def answered() -> bool:
        with contextlib.suppress(httpx.TransportError):
            answers.append(
                httpx.post(
                    stack.state()["gateway"] + "/v1/chat/completions",
                    json=body,
                    headers=headers,
                    timeout=60,
                )
            )
        return bool(answers) and answers[-1].status_code == 200

    until(answered, timeout, f"an answer: {[a.text for a in answers[-1:]]}")
    rewarded = stack.archon("reward", "--session", session["session_id"], "-0.5")
    assert rewarded.returncode == 0, rewarded.stderr
    assert rewarded.stdout == f"reward -0.5 recorded for {session['session_id']}\n"
    return str(session["session_id"])


def test_it_prints_the_addresses_and_every_process_is_ready(stack: Installation) -> None:
    printed = stack.printed
    state = stack.state()
    assert set(state["pids"]) == NAMES
    assert f"gateway      {state['gateway']}/v1" in printed
    assert f"Temporal UI  {state['temporal_ui']}" in printed
    assert httpx.get(state["temporal_ui"], follow_redirects=True).status_code == 200
    status = stack.archon("status", "--json")
    assert status.returncode == 0, status.stdout
    assert {p["state"] for p in json.loads(status.stdout)["processes"].values()} == {"ready"}


def test_no_secret_is_readable_or_shown(stack: Installation) -> None:
    secrets = stack.folder / ".archon" / "secrets"
    shown = (stack.folder / ".archon" / "run" / "state.json").read_text()
    shown += stack.printed
    names = {"admin.key", "engine.token", "postgres.password"}
    assert {p.name for p in secrets.iterdir()} == names
    for file in secrets.iterdir():
        assert file.stat().st_mode & 0o077 == 0
        assert file.read_text().strip() not in shown


def test_a_second_up_is_refused_by_name(stack: Installation) -> None:
    for options in ((), ("--detach",)):
        again = stack.archon("up", *options)
        assert again.returncode == 1
        assert f"already running on {stack.folder}/.archon" in again.stderr
        assert str(stack.state()["supervisor"]) in again.stderr


def test_a_session_is_played_and_scored(stack: Installation) -> None:
    assert play(stack).startswith("ses_")


def test_keys_are_made_listed_and_revoked(stack: Installation) -> None:
    made = stack.archon("key", "create", "--policy", "game", "--label", "bot", "--json")
    assert made.returncode == 0, made.stderr
    key = json.loads(made.stdout)
    listed = stack.archon("key", "list")
    assert [line.split()[-2:] for line in listed.stdout.splitlines()] == [["valid", "bot"]]
    revoked = stack.archon("key", "revoke", key["key_id"][:10])
    assert revoked.returncode == 0, revoked.stderr
    assert "revoked" in stack.archon("key", "list").stdout
    unknown = stack.archon("key", "revoke", "f" * 64)
    assert (unknown.returncode, unknown.stderr[:12]) == (1, "error: 0 key")


def test_logs_are_printed_by_name(stack: Installation) -> None:
    assert "listening on" in stack.archon("logs", "gateway").stdout
    unknown = stack.archon("logs", "gatway")
    assert unknown.returncode == 1
    assert "there are gateway" in unknown.stderr


@pytest.mark.parametrize(
    "names",
    [("gateway", "rep_embedded_game_1"), ("worker", "trainer"), ("temporal", "postgres")],
    ids=" and ".join,
)
def test_what_is_killed_is_back_within_15_seconds(
    stack: Installation, names: tuple[str, ...]
) -> None:
    until(stack.is_ready, BACK_S, "everything ready before the kill")
    before = stack.state()["pids"]
    for name in names:
        os.kill(before[name], signal.SIGKILL)

    def are_new() -> bool:
        pids = stack.state()["pids"]
        return all(pids.get(name) not in (None, before[name]) for name in names)

    begun = time.monotonic()
    until(are_new, BACK_S, f"new {names}")
    until(stack.is_ready, BACK_S - (time.monotonic() - begun), f"everything ready after {names}")


def test_work_goes_on_after_all_these_kills(stack: Installation) -> None:
    assert play(stack).startswith("ses_")


def test_a_killed_supervisor_takes_all_with_it_and_loses_nothing(stack: Installation) -> None:
    session = play(stack)
    pids = list(stack.state()["pids"].values())
    gateway = stack.state()["gateway"]
    os.kill(stack.state()["supervisor"], signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)), 15, "the end of all children")
    status = stack.archon("status")
    assert status.returncode == 1
    assert "is not running" in status.stdout

    stack.up()
    assert stack.state()["gateway"] == gateway, "a free port is kept over restarts"
    ended = stack.archon("session", "end", "--session", session)
    assert ended.returncode == 0, ended.stderr


def test_down_from_another_shell_ends_everything_in_order(stack: Installation) -> None:
    pids = list(stack.state()["pids"].values())
    down = stack.archon("down")
    assert (down.returncode, down.stdout) == (0, "stopped\n"), down.stderr
    assert stack.process is not None
    assert stack.process.wait(10) == 0
    assert all(map(is_gone, pids))
    assert stack.state()["status"] == "stopped"
    assert not (stack.folder / ".archon" / "postgres" / "data" / "postmaster.pid").exists()
    again = stack.archon("down")
    assert again.returncode == 1
    assert "is not running" in again.stderr
