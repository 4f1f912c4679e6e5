"""A training engine that does what its plan says: ``python fake_engine.py PLAN_FILE``.

Each line of the plan is the behaviour of one operation and is taken off the file when it begins,
so that a process that takes over goes on with the next: ok, die, silent, garbage, nan, empty,
busy:SECONDS, start:ACTION (before ready), wrong (an answer that is no event), stderr.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def next_behaviour(plan: Path) -> str:
    first, _, rest = plan.read_text().partition("\n")
    plan.write_text(rest)
    return first or "ok"


def publish(operation: dict[str, str]) -> dict[str, Any]:
    out = Path(operation["out"])
    out.mkdir(parents=True, exist_ok=True)
    batch = operation.get("batch")
    made = {
        "attempt": operation["attempt"],
        "weights": f"{operation['attempt']}/weights",
        "model_sha256": hashlib.sha256(Path(batch).read_bytes() if batch else b"").hexdigest(),
        "metrics": {"loss": 0.5},
        "probe": {"token_ids": [1, 2], "logprobs": [-1.0]},
    }
    (out / ".aside").write_text(json.dumps(made))
    (out / ".aside").rename(out / "checkpoint.json")
    return made


def act(behaviour: str, operation: dict[str, str]) -> None:
    if operation["op"] == "step":
        say(event="progress", span="logprobs", done=1, total=1)
    match behaviour.split(":"):
        case ["die"]:
            print("cannot allocate 7 bytes", file=sys.stderr, flush=True)
            os._exit(7)
        case ["silent"]:
            time.sleep(60)
        case ["nan"]:
            say(event="error", retryable=False, type="NonFiniteGradientError", message="nan at 3")
            return
        case ["io"]:
            say(event="error", retryable=True, type="OSError", message="no space")
            return
        case ["empty"]:
            say(event="empty_signal", reason="every advantage is 0")
            return
        case ["garbage"]:
            print("a library says hello\n{not json", flush=True)
            print('{"no": "event"}', flush=True)
        case ["busy", seconds]:
            time.sleep(float(seconds))
    say(event="progress", span="forward_backward", done=1, total=2)
    made = publish(operation)
    say(event="done", checkpoint=made, metrics={"loss": 0.5}, spans={"save": 0.25})


def main() -> None:
    plan = Path(sys.argv[1])
    with plan.with_suffix(".pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    if plan.read_text().startswith("start:"):
        behaviour = next_behaviour(plan)
        if behaviour == "start:die":
            print("no CUDA for you", file=sys.stderr, flush=True)
            os._exit(3)
    say(event="ready")
    for line in sys.stdin:
        operation = json.loads(line)
        with plan.with_suffix(".operations").open("a") as log:
            log.write(line)
        act(next_behaviour(plan), operation)


if __name__ == "__main__":
    main()
