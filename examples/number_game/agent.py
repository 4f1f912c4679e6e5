"""A plain agent that plays the number game with the `openai` package and nothing else.

Point it at a gateway by base URL and key, as any agent is. It knows nothing of training: it
plays, and posts what the game paid to `/rl/set_reward` with the key that it plays with.

Long-lived, one JSON object a line on stdin, one a line on stdout when an episode is over:

    {"episode": "e1", "base_url": "http://…/v1", "api_key": "sk-sess-…", "task": {"target": 3}}
    {"episode": "e1", "reward": 0.92, "turns": 2, "errors": []}

Or once, when OPENAI_BASE_URL, OPENAI_API_KEY and ARCHON_TASK are set: it plays that one task and
exits with 1 if that failed. One HTTP client serves the whole process; nothing is retried.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from game import NumberGame  # type: ignore[import-not-found]
from openai import OpenAI, OpenAIError

PARALLEL = int(os.environ.get("NUMBER_GAME_PARALLEL", "8"))
MODEL = os.environ.get("NUMBER_GAME_MODEL", "default")


def play(client: OpenAI, task: dict[str, Any]) -> NumberGame:
    game = NumberGame(task["target"])
    messages: list[Any] = []
    while not game.done:
        messages.append({"role": "user", "content": game.answer})
        completion = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=1, temperature=1
        )
        said = completion.choices[0].message.content
        messages.append({"role": "assistant", "content": said or ""})
        game.move(said)
    return game


def post_reward(client: OpenAI, reward: float) -> None:
    """`/rl/set_reward` stands at the root of the gateway, beside `/v1`."""
    parts = urlsplit(str(client.base_url))
    url = f"{parts.scheme}://{parts.netloc}/rl/set_reward"
    client.post(url, cast_to=object, body={"reward": reward})


def episode(client: OpenAI, order: dict[str, Any]) -> dict[str, Any]:
    """Play one order and say how it went; an error ends the episode, not the process."""
    report: dict[str, Any] = {"episode": order.get("episode"), "reward": None, "turns": 0}
    try:
        own = client.with_options(api_key=order["api_key"], base_url=order["base_url"])
        game = play(own, order["task"])
        post_reward(own, game.reward)
    except (OpenAIError, KeyError, TypeError, ValueError) as error:
        return report | {"errors": [f"{type(error).__name__}: {error}"]}
    return report | {"reward": game.reward, "turns": game.turns, "errors": []}


def serve(client: OpenAI) -> None:
    lock = threading.Lock()

    def run(line: str) -> None:
        report = episode(client, json.loads(line))
        with lock:
            print(json.dumps(report), flush=True)

    with ThreadPoolExecutor(PARALLEL) as pool:
        played = [pool.submit(run, line) for line in sys.stdin if line.strip()]
    for future in played:
        future.result()


def main() -> int:
    client = OpenAI(api_key="unset", base_url="http://unset.invalid/v1", max_retries=0, timeout=120)
    if "ARCHON_TASK" not in os.environ:
        serve(client)
        return 0
    order = {
        "episode": os.environ.get("ARCHON_EPISODE", "once"),
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "task": json.loads(os.environ["ARCHON_TASK"]),
    }
    report = episode(client, order)
    print(json.dumps(report), flush=True)
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
