"""The game's rules, the policy's tokens, and the agent against a scripted gateway."""

import ast
import json
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from archon.records import PolicySettings, loads
from archon.records.policy import AlgorithmSettings
from engine.models import ModelConfig, hf
from examples.number_game import bare_loop, settings
from examples.number_game.game import NumberGame
from examples.number_game.model import write_policy

FOLDER = Path(__file__).parents[2] / "examples" / "number_game"


def play(target: int, *moves: str) -> NumberGame:
    game = NumberGame(target)
    for move in moves:
        game.move(move)
    return game


@pytest.mark.parametrize(
    ("target", "moves", "reward", "answer"),
    [
        (2, ["2"], 1.0, "right"),
        (3, ["2", "3"], 0.92, "right"),
        (4, ["2", "3", "4"], 0.84, "right"),
        (4, ["1", "2", "3"], 0.0, "low"),
        (1, ["4", "3", "2"], 0.0, "high"),
        (1, ["2", "low"], 0.0, None),
        (1, ["5"], 0.0, None),
        (1, [""], 0.0, None),
    ],
)
def test_rewards(target: int, moves: list[str], reward: float, answer: str | None) -> None:
    game = play(target, *moves)
    assert game.done
    assert game.reward == pytest.approx(reward)
    assert game.answer == answer
    assert game.turns == len(moves)
    with pytest.raises(ValueError, match="the game is over"):
        game.move("1")


def test_the_answers_say_on_which_side_the_guess_lies() -> None:
    game = NumberGame(3)
    assert game.answer == "guess"
    game.move(" 1\n")
    assert (game.answer, game.done) == ("low", False)
    game.move("4")
    assert (game.answer, game.done) == ("high", False)


def test_halving_is_worth_092() -> None:
    rewards = [
        play(1, "2", "1").reward,
        play(2, "2").reward,
        play(3, "2", "3").reward,
        play(4, "2", "3", "4").reward,
    ]
    assert sum(rewards) / 4 == pytest.approx(0.92)


def test_tasks_are_balanced_and_drawn_from_the_seed() -> None:
    found = [task["target"] for task in settings.tasks(400, seed=3)]
    assert [found.count(number) for number in (1, 2, 3, 4)] == [100] * 4
    assert found != [task["target"] for task in settings.tasks(400, seed=4)]


@pytest.mark.parametrize("name", ["game.py", "agent.py"])
def test_game_and_agent_import_nothing_of_ours(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text())
    modules = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    allowed = sys.stdlib_module_names | ({"openai", "game"} if name == "agent.py" else set())
    assert modules <= allowed


def test_the_policy_is_a_small_model_with_a_small_vocabulary(tmp_path: Path) -> None:
    write_policy(tmp_path / "a", 3)
    write_policy(tmp_path / "b", 3)
    write_policy(tmp_path / "c", 4)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    weights = [(tmp_path / name / hf.WEIGHTS).read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]
    model = hf.load(tmp_path / "a")
    assert 80_000 < sum(parameter.numel() for parameter in model.parameters()) < 120_000
    config = ModelConfig.load(tmp_path / "a")
    assert config.vocab_size <= 32
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer) == config.vocab_size
    for word in ("1", "2", "3", "4", "low", "high", "right", "guess", "<user>", "<assistant>"):
        assert len(tokenizer.encode(word)) == 1, word
        assert tokenizer.decode(tokenizer.encode(word)) == word


def test_an_episode_is_one_growing_sequence_of_few_tokens(tmp_path: Path) -> None:
    write_policy(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages: list[dict[str, str]] = []
    before: list[int] = []
    for answer, move in (("guess", "2"), ("low", "3"), ("low", "4"), ("right", "")):
        messages.append({"role": "user", "content": answer})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids[: len(before)] == before
        assert len(ids) - len(before) <= 2 * 4 + 1
        before = ids + tokenizer.encode(move)
        messages.append({"role": "assistant", "content": move})
    assert len(before) <= 64


def test_the_policy_learns_the_game_one_version_behind() -> None:
    torch.set_num_threads(1)
    algorithm = AlgorithmSettings(**settings.ALGORITHM)
    curve = bare_loop.learn(seed=1, behind=1, steps=25, algorithm=algorithm)
    assert curve.first <= 0.15
    assert sum(curve.rewards[-320:]) / 320 >= 0.4


def test_the_demo_s_settings_are_valid() -> None:
    raw = tomllib.loads(settings.CONFIG.format(data_dir="/d", model="/d/model"))
    policy = loads(PolicySettings, raw["policies"]["default"])
    assert policy.algorithm == AlgorithmSettings(**settings.ALGORITHM)
    assert (policy.model, policy.max_tokens, policy.max_staleness) == ("/d/model", 1, 2)
    assert policy.batch_groups == settings.GROUPS_PER_STEP


class Gateway(ThreadingHTTPServer):
    """Always says `says`; `fail` answers every completion with 500."""

    def __init__(self, says: str, fail: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.says, self.fail = says, fail
        self.seen: list[tuple[str, str, dict[str, Any]]] = []
        self.connections: set[Any] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for seen, _, body in self.seen if seen == path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers["authorization"].removeprefix("Bearer ")
        self.server.connections.add(self.client_address)
        self.server.seen.append((self.path, key, body))
        if self.path == "/rl/set_reward":
            self.reply(200, {"ok": True})
        elif self.server.fail:
            self.reply(500, {"error": {"message": "down", "type": "server_error", "code": 500}})
        else:
            message = {"role": "assistant", "content": self.server.says}
            self.reply(
                200,
                {
                    "id": "c1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "default",
                    "choices": [{"index": 0, "finish_reason": "length", "message": message}],
                },
            )

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing goes to the tests' output."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    server = Gateway("2")
    yield server
    server.shutdown()
    server.server_close()


def agent(
    orders: list[dict[str, Any]], **environment: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "agent.py")],
        input="".join(json.dumps(order) + "\n" for order in orders),
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )
    assert done.stderr == ""
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, {report["episode"]: report for report in reports}


def test_the_agent_plays_many_episodes_with_few_connections(gateway: Gateway) -> None:
    orders = [
        {
            "episode": f"e{n}",
            "base_url": gateway.url,
            "api_key": f"k{n}",
            "task": {"target": 2 + n % 2},
        }
        for n in range(30)
    ]
    status, reports = agent(orders)
    assert status == 0
    assert len(reports) == 30
    assert reports["e0"] == {"episode": "e0", "reward": 1.0, "turns": 1, "errors": []}
    assert reports["e1"] == {"episode": "e1", "reward": 0.0, "turns": 3, "errors": []}
    rewards = {key: body for path, key, body in gateway.seen if path == "/rl/set_reward"}
    assert rewards == {f"k{n}": {"reward": float(n % 2 == 0)} for n in range(30)}
    assert len(gateway.bodies("/rl/set_reward")) == 30
    assert len(gateway.connections) <= 8
    long = [body for path, key, body in gateway.seen if key == "k1" and "messages" in body]
    assert [body["max_tokens"] for body in long] == [1, 1, 1]
    assert [body["temperature"] for body in long] == [1, 1, 1]
    assert long[2]["messages"] == [
        {"role": "user", "content": "guess"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "low"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "low"},
    ]


def test_the_agent_reports_an_error_once_and_goes_on(gateway: Gateway) -> None:
    gateway.fail = True
    orders = [
        {"episode": "bad", "base_url": gateway.url, "api_key": "k", "task": {"target": 2}},
        {"episode": "worse", "base_url": gateway.url, "api_key": "k", "task": {}},
    ]
    status, reports = agent(orders)
    assert status == 0
    assert reports["bad"]["reward"] is None
    assert reports["bad"]["errors"][0].startswith("InternalServerError")
    assert reports["worse"]["errors"][0].startswith("KeyError")
    assert len(gateway.bodies("/v1/chat/completions")) == 1
    assert gateway.bodies("/rl/set_reward") == []


def test_the_agent_plays_once_by_its_environment(gateway: Gateway) -> None:
    environment = {
        "OPENAI_BASE_URL": gateway.url,
        "OPENAI_API_KEY": "sk-sess-1",
        "ARCHON_TASK": json.dumps({"target": 2}),
    }
    status, reports = agent([], **environment)
    assert status == 0
    (report,) = reports.values()
    assert (report["reward"], report["turns"], report["errors"]) == (1.0, 1, [])
    assert gateway.seen[-1] == ("/rl/set_reward", "sk-sess-1", {"reward": 1.0})
    gateway.fail = True
    assert agent([], **environment)[0] == 1
