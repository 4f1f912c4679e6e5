"""The command line: messages instead of tracebacks, exit codes, and what it says to the gateway."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from archon.cli.app import run

HEAVY = ("pydantic", "httpx", "psycopg", "sqlalchemy", "temporalio", "torch", "fastapi")


class Gateway(BaseHTTPRequestHandler):
    """Answers as it is told, and keeps what it was asked."""

    asked: list[tuple[str, str, str, Any]] = []
    answers: dict[str, tuple[int, Any]] = {}

    def _handle(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        route = f"{self.command} {self.path}"
        self.asked.append((self.command, self.path, self.headers["authorization"], body))
        code, answer = self.answers[route]
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _handle

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The options that name a gateway; see ``Gateway.asked`` and ``Gateway.answers``."""
    monkeypatch.setattr(Gateway, "asked", [])
    monkeypatch.setattr(Gateway, "answers", {})
    server = HTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield ["--gateway", f"http://127.0.0.1:{server.server_port}/v1", "--key", "sk-admin-x"]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARCHON_CONFIG", raising=False)
    return tmp_path


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from archon.cli.app import run; code = run(['--help']); "
        f"print('LOADED', [m for m in {HEAVY!r} if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("LOADED [] 0\n")
    for command in ("up", "down", "status", "logs", "init", "session", "reward", "key", "rollout"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["frobnicate"], 2, "No such command 'frobnicate'"),
        (["up", "--colour"], 2, "No such option: --colour"),
        (["down"], 1, "Archon is not running on"),
        (["logs"], 1, "Archon has not run there yet"),
        (["reward", "1", "--session", "s"], 1, "Start it with `archon up`"),
        (["up", "--port", "70000"], 1, "gateway.port: Input should be less than"),
        (["up", "--config", "none.toml"], 1, "there is no such file"),
        (["up", "--set", "gateway.colour=red"], 1, "gateway.colour: no such setting"),
        (["up", "--host", "0.0.0.0"], 1, "no admin key of your own"),
        (["up", "--detach", "--host", "0.0.0.0"], 1, "no admin key of your own"),
        (["up", "--set", "policies.p.model=nowhere"], 1, "has no config.json"),
    ],
)
def test_errors_are_messages(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    said = capsys.readouterr()
    assert words in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_status_of_nothing_is_an_exit_code_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == 1
    assert "is not running" in capsys.readouterr().out
    assert run(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["running"] is False


def test_version_and_init(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import archon

    assert run(["version"]) == 0
    assert capsys.readouterr().out == archon.__version__ + "\n"
    assert run(["init", "mine.toml"]) == 0
    assert (folder / "mine.toml").exists()
    assert run(["init", "mine.toml"]) == 1
    assert "--force" in capsys.readouterr().err
    assert run(["init", "mine.toml", "--force"]) == 0


def test_a_session_is_started(gateway: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    made = {"session_id": "ses_1", "api_key": "sk-sess-1"}
    Gateway.answers["POST /rl/start_session"] = (200, made)
    options = ["--task", "t", "--policy", "game", "--label", "a=b", *gateway]
    assert run(["session", "start", *options]) == 0
    body = {"task_id": "t", "policy": "game", "labels": {"a": "b"}}
    assert Gateway.asked == [("POST", "/rl/start_session", "Bearer sk-admin-x", body)]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["session", "ses_1"], ["base_url", gateway[1]], ["api_key", "sk-sess-1"],
    ]  # fmt: skip
    assert run(["session", "start", "--json", *gateway]) == 0
    assert json.loads(capsys.readouterr().out) == made


@pytest.mark.parametrize("command", [["reward"], ["session", "reward"]])
def test_a_reward_is_sent_even_a_negative_one(command: list[str], gateway: list[str]) -> None:
    Gateway.answers["POST /rl/set_reward"] = (200, {})
    options = ["--session", "s", "--interaction", "i", "--component", "c", "--source", "me"]
    assert run([*command, "-0.25", *options, "--idempotency-key", "k", *gateway]) == 0
    assert Gateway.asked[0][3] == {
        "reward": -0.25, "session_id": "s", "interaction_id": "i", "component": "c",
        "source": "me", "idempotency_key": "k",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "good"])
def test_a_reward_that_is_no_finite_number_is_not_sent(
    value: str, gateway: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reward", value, *gateway]) == 1
    assert value in capsys.readouterr().err
    assert Gateway.asked == []


def test_what_the_gateway_says_is_shown(
    gateway: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"error": {"message": "no session ses_9", "code": "not_found"}}
    Gateway.answers["POST /rl/end_session"] = (404, error)
    assert run(["session", "end", "--session", "ses_9", *gateway]) == 1
    assert "POST /rl/end_session: 404: no session ses_9" in capsys.readouterr().err


def test_a_gateway_that_is_away_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    gone = ["--gateway", "http://127.0.0.1:1", "--key", "k"]
    assert run(["key", "list", *gone]) == 1
    assert "the gateway at http://127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_a_key_is_revoked_by_the_beginning_of_its_id(
    gateway: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shared = {"scope": "tenant", "policy": "game", "label": "", "expires_at": None}
    keys = [{**shared, "key_id": f"abc{n}", "revoked_at": None} for n in (1, 2)]
    Gateway.answers["GET /rl/keys"] = (200, {"keys": keys})
    Gateway.answers["DELETE /rl/keys/abc2"] = (200, {})
    assert run(["key", "revoke", "abc", *gateway]) == 1
    assert "2 keys have an id that begins with 'abc'" in capsys.readouterr().err
    assert run(["key", "revoke", "abc2", *gateway]) == 0
    assert Gateway.asked[-1][:2] == ("DELETE", "/rl/keys/abc2")


def test_a_key_is_made_for_some_hours(gateway: list[str]) -> None:
    Gateway.answers["POST /rl/keys"] = (200, {"api_key": "sk-1"})
    options = ["--policy", "game", "--label", "bot", "--expires-in", "1.5"]
    assert run(["key", "create", *options, *gateway]) == 0
    assert Gateway.asked[0][3] == {"label": "bot", "policy": "game", "expires_in": 5400}
