"""Agents that keep a ledger: what the gateway acknowledged to them must be there at the end.

Invariant: a thing enters the ledger only after its whole answer with status 200 was read.
"""

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from examples.number_game.game import NumberGame
from tests.kit.invariants import Acknowledged

RETRIES, PAUSE_S = 60, 0.5
THINKING_S = 0.5


@dataclass
class Ledger:
    """Shared by all players. ``refusals`` counts answers that were no success, by status."""

    acknowledged: Acknowledged = field(default_factory=Acknowledged)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    episodes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def refused(self, answer: httpx.Response) -> None:
        """A refusal must be the protocol's error, and say when to come back."""
        with self.lock:
            self.refusals[str(answer.status_code)] += 1
            try:
                message = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                self.wrong.append(f"{answer.status_code} without an error: {answer.text[:200]}")
                return
            if answer.status_code in (429, 503) and "retry-after" not in answer.headers:
                self.wrong.append(f"{answer.status_code} without retry-after: {message}")
            if answer.status_code not in (429, 503):
                self.wrong.append(f"{answer.status_code}: {message}")


class Player(threading.Thread):
    """Plays groups of the number game until it is told to stop; every other call is a stream."""

    def __init__(
        self, address: str, admin_key: str, policy: str, ledger: Ledger, seed: int
    ) -> None:
        super().__init__(daemon=True)
        self._address, self._admin, self._policy = address, admin_key, policy
        self._ledger, self._random = ledger, random.Random(seed)
        self.stop = threading.Event()

    def run(self) -> None:
        with httpx.Client(timeout=30) as client:
            self._client = client
            while not self.stop.is_set():
                self._group()

    def _group(self) -> None:
        fields = {"task_id": "number", "group_size": 4, "policy": self._policy}
        group = self._persist("/rl/start_session", self._admin, fields)
        target = self._random.randint(1, 4)
        for key in group["api_keys"] if group else []:
            # Never two equal ones: a batch without a signal is no step, and steps are awaited here.
            reward = self._episode(key, target) + self._random.random() / 10
            self._reward(key, reward)
            self.stop.wait(THINKING_S)
            with self._ledger.lock:
                self._ledger.episodes += 1

    def _episode(self, key: str, target: int) -> float:
        game, messages = NumberGame(target), list[dict[str, str]]()
        while not game.done and not self.stop.is_set():
            messages.append({"role": "user", "content": game.answer or ""})
            said = self._call(key, messages)
            if said is None:
                messages.pop()
                time.sleep(PAUSE_S)
                continue
            messages.append({"role": "assistant", "content": said})
            game.move(said)
        return game.reward

    def _call(self, key: str, messages: list[dict[str, str]]) -> str | None:
        """What the model said, or None where the call failed in any way."""
        body = {"model": self._policy, "messages": messages, "max_tokens": 1, "temperature": 1}
        stream = self._random.random() < 0.5
        headers = {"authorization": f"Bearer {key}"}
        url = f"{self._address}/v1/chat/completions"
        try:
            answer = self._client.post(url, json=body | {"stream": stream}, headers=headers)
        except httpx.TransportError as error:
            with self._ledger.lock:
                self._ledger.refusals[type(error).__name__] += 1
            return None
        if answer.status_code != 200:
            self._ledger.refused(answer)
            return None
        found = self._read_stream(answer.text) if stream else self._read_body(answer.json())
        if found is None:
            return None
        with self._ledger.lock:
            self._ledger.acknowledged.interactions.add(found[0])
        return found[1]

    @staticmethod
    def _read_body(body: dict[str, Any]) -> tuple[str, str]:
        return body["id"], body["choices"][0]["message"]["content"]

    @staticmethod
    def _read_stream(text: str) -> tuple[str, str] | None:
        """The id and the text of a stream that came to its proper end."""
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not lines or lines[-1] != "[DONE]":
            return None
        chunks = [json.loads(line) for line in lines[:-1]]
        said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        return chunks[0]["id"], said

    def _reward(self, key: str, value: float) -> None:
        token = f"{self._random.getrandbits(64):x}"
        answer = self._persist("/rl/set_reward", key, {"reward": value, "idempotency_key": token})
        if answer is not None:
            with self._ledger.lock:
                self._ledger.acknowledged.rewards[answer["reward_id"]] = value

    def _persist(self, path: str, key: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        """POST until it is acknowledged; None when told to stop before that."""
        for _ in range(RETRIES):
            try:
                answer = self._client.post(
                    self._address + path, json=fields, headers={"authorization": f"Bearer {key}"}
                )
            except httpx.TransportError as error:
                with self._ledger.lock:
                    self._ledger.refusals[type(error).__name__] += 1
            else:
                if answer.status_code == 200:
                    return dict(answer.json())
                self._ledger.refused(answer)
            if self.stop.wait(PAUSE_S):
                break
        return None
