"""What the loop costs beside the training itself, and how long agents stall when weights change.

Measured, through the whole stack as ``archon up`` runs it, with a tiny model:

- ``overhead_s``: from the commit of the last reward of a batch to the first token, on a stream that
  was open all the while, that carries the new version; less what the trainer spent in ``logprobs``,
  ``forward_backward`` and ``optimizer``. The batch is otherwise ready and nothing else trains. The
  median over at least 10 versions.
- ``stall_p99_ms``: four streams stay open; per stream and update the longest gap between two tokens
  from the reward to half a second after the new version, less that stream's median gap. The 99th
  percentile.

Against what: an ideal loop, in which the new weights serve the moment they are computed (0 s), and
streams that do not notice (0 ms).

What would make it wrong: a stream that ends before the update (it is opened again, and the update
counts only for streams that were open); a commit seen late (the reward is stamped before it is
sent, so its whole round trip counts against us); another load on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SPANS = ("seconds_logprobs", "seconds_forward_backward", "seconds_optimizer")
CONTEXT = 1024
CONFIG = """
data_dir = "data"
[gateway]
port = 0
[temporal]
port = 0
ui_port = 0
[policies.default]
model = "model"
max_tokens = {context}
max_model_len = {context}
close_on = "end"
batch_groups = 1
max_ahead = 0
admission = false
"""


def write_model(folder: Path) -> None:
    """The number game's model with a long context and nothing that ends an answer."""
    from examples.number_game.model import write_policy

    write_policy(folder, 1)
    for name, change in (
        ("config.json", {"max_position_embeddings": CONTEXT}),
        ("tokenizer_config.json", {"model_max_length": CONTEXT, "eos_token": None}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))


_PHASES = """
SELECT extract(epoch FROM s.sealed_at - r.at), extract(epoch FROM m.created_at - s.sealed_at),
       extract(epoch FROM v.created_at - m.created_at), extract(epoch FROM v.live_at - v.created_at)
FROM policy_version v JOIN batch_manifest m USING (manifest_id)
CROSS JOIN LATERAL (SELECT max(created_at) AS at FROM reward WHERE created_at < m.created_at) r
CROSS JOIN LATERAL (
    SELECT max(sealed_at) AS sealed_at FROM session JOIN sample USING (session_id)
    WHERE manifest_id = v.manifest_id
) s
ORDER BY v.version DESC LIMIT 1
"""


class Stack:
    """``archon up`` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        write_model(folder / "model")
        (folder / "archon.toml").write_text(CONFIG.format(context=CONTEXT))
        self.folder = folder
        self.environment = {**os.environ, "ARCHON_CONFIG": str(folder / "archon.toml")}

    def __enter__(self) -> Stack:
        from archon.stack import database_url

        self._archon("up", "--detach")
        state = json.loads((self.folder / "data" / "run" / "state.json").read_text())
        self.gateway = state["gateway"]
        self.database_url = database_url(self.folder / "data")
        key = (self.folder / "data" / "secrets" / "admin.key").read_text().strip()
        self.admin = httpx.Client(
            base_url=self.gateway, headers={"authorization": f"Bearer {key}"}, timeout=60
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._archon("down")

    def _archon(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "archon.cli", *words], cwd=self.folder, env=self.environment,
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, **fields: object) -> dict[str, Any]:
        answer = self.admin.post("/rl/start_session", json=fields)
        answer.raise_for_status()
        return dict(answer.json())

    def phases(self) -> dict[str, float]:
        """Where the time of the newest version went, in seconds, by what the rows say."""
        deadline = time.monotonic() + 30
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            while (row := connection.execute(_PHASES).fetchone()) is None or None in row:
                if time.monotonic() > deadline:
                    raise SystemExit("the newest version is not live after 30 s")
                time.sleep(0.05)
        names = ("reward_to_seal", "seal_to_claim", "claim_to_commit", "commit_to_live")
        return dict(zip(names, map(float, row), strict=True))

    def newest(self) -> tuple[int, dict[str, float]]:
        with psycopg.connect(self.database_url) as connection:
            row = connection.execute(
                "SELECT version, metrics FROM policy_version ORDER BY version DESC LIMIT 1"
            ).fetchone()
        assert row is not None, "a policy has a version before its replicas serve"
        return row[0], row[1]


@dataclass
class Stream:
    """An agent's stream that never rests: when one answer is full, the next is opened."""

    stack: Stack
    stop: threading.Event
    tokens: list[tuple[float, int]] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def run(self) -> None:
        key = self.stack.start(task_id="stream", trainable=False)["api_key"]
        headers = {"authorization": f"Bearer {key}"}
        body = {"model": "default", "stream": True, "temperature": 1,
                "messages": [{"role": "user", "content": "guess"}]}  # fmt: skip
        with httpx.Client(base_url=self.stack.gateway, headers=headers, timeout=60) as client:
            while not self.stop.is_set():
                self.opened.append(time.time())
                with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    self._read(answer)

    def _read(self, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            self.errors.append(f"status {answer.status_code}")
            self.stop.wait(0.1)
        for line in answer.iter_lines():
            if self.stop.is_set():
                return
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.errors.append(str(chunk["error"]))
            elif version := chunk.get("system_fingerprint"):
                self.tokens.append((time.time(), int(version[1:])))


def play_group(stack: Stack) -> tuple[list[str], list[float]]:
    """Two episodes of one group, played and not yet ended; the keys and what they will be paid."""
    group = stack.start(task_id="game", group_size=2)
    for key in group["api_keys"]:
        answer = httpx.post(
            f"{stack.gateway}/v1/chat/completions", timeout=60,
            headers={"authorization": f"Bearer {key}"},
            json={"model": "default", "max_tokens": 8, "temperature": 1,
                  "messages": [{"role": "user", "content": "guess"}]},
        )  # fmt: skip
        answer.raise_for_status()
    return group["api_keys"], [1.0, 0.0]


def pay(stack: Stack, key: str, reward: float) -> None:
    headers = {"authorization": f"Bearer {key}"}
    for path, body in (("set_reward", {"reward": reward}), ("end_session", {})):
        httpx.post(
            f"{stack.gateway}/rl/{path}", json=body, headers=headers, timeout=60
        ).raise_for_status()


def one_update(stack: Stack, streams: list[Stream]) -> tuple[float, list[float]]:
    """One version: (overhead in seconds, the extra stall of each open stream in seconds)."""
    (first, last), rewards = play_group(stack)
    pay(stack, first, rewards[0])
    before, _ = stack.newest()
    headers = {"authorization": f"Bearer {last}"}
    with httpx.Client(base_url=stack.gateway, headers=headers, timeout=60) as client:
        client.post("/rl/end_session", json={}).raise_for_status()
        time.sleep(0.3)
        committed = time.time()
        client.post("/rl/set_reward", json={"reward": rewards[1]}).raise_for_status()
    deadline = committed + 60
    while (seen := _first_token(streams, before, committed)) is None:
        if time.time() > deadline:
            raise SystemExit(f"no token of a version after {before} in 60 s")
        time.sleep(0.01)
    time.sleep(0.5)
    _, metrics = stack.newest()
    overhead = seen - committed - sum(metrics[name] for name in SPANS)
    return overhead, [s for s in (_stall(stream, committed, seen) for stream in streams) if s >= 0]


def _first_token(streams: list[Stream], before: int, since: float) -> float | None:
    times = [t for s in streams for t, version in s.tokens[-400:] if version > before and t > since]
    return min(times, default=None)


def _stall(stream: Stream, start: float, seen: float) -> float:
    """The longest gap around the update less the median gap; negative where it was not open."""
    if any(start < opened < seen + 0.5 for opened in stream.opened):
        return -1.0
    times = [t for t, _ in stream.tokens if start - 0.1 < t < seen + 0.5]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return max(gaps) - statistics.median(gaps) if len(gaps) > 2 else -1.0


def measure(versions: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="archon-bench-") as folder:
        Path(folder).chmod(0o755)
        with Stack(Path(folder)) as stack:
            stop = threading.Event()
            streams = [Stream(stack, stop) for _ in range(4)]
            threads = [threading.Thread(target=s.run, daemon=True) for s in streams]
            for thread in threads:
                thread.start()
            time.sleep(1.0)
            overheads: list[float] = []
            stalls: list[float] = []
            phases: list[dict[str, float]] = []
            for number in range(versions):
                overhead, stalled = one_update(stack, streams)
                overheads.append(overhead)
                stalls += stalled
                phases.append(stack.phases())
                shown = ", ".join(f"{1000 * s:.0f}" for s in stalled)
                print(f"{number + 1:3d}  overhead {overhead:6.3f} s   stalls {shown} ms")
            stop.set()
            for thread in threads:
                thread.join(5)
            if errors := [e for s in streams for e in s.errors]:
                raise SystemExit(f"streams saw errors: {errors[:3]}")
    if len(stalls) < 10:
        raise SystemExit("too few streams were open during the updates")
    gaps = [b[0] - a[0] for s in streams for a, b in zip(s.tokens, s.tokens[1:], strict=False)]
    parts = {f"{name}_s": statistics.median(p[name] for p in phases) for name in phases[0]}
    return parts | {
        "overhead_s": statistics.median(overheads),
        "overhead_max_s": max(overheads),
        "stall_p99_ms": 1000 * statistics.quantiles(stalls, n=100, method="inclusive")[98],
        "stall_p50_ms": 1000 * statistics.median(stalls),
        "token_gap_p50_ms": 1000 * statistics.median(gaps),
        "versions": len(overheads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the fewest versions that count")
    parser.add_argument("--versions", type=int, default=40, help="updates (default: %(default)s)")
    arguments = parser.parse_args()
    figures = measure(12 if arguments.quick else arguments.versions)
    for name, value in figures.items():
        print(f"{name:18} {value:10.3f}")
    machine = f"{platform.machine()} {os.cpu_count()} cores"
    print(json.dumps({"name": "loop_overhead", "quick": arguments.quick, "machine": machine,
                      "figures": figures}))  # fmt: skip


if __name__ == "__main__":
    main()
