"""What the demo's policy learns with, and how much of it; read by the bare loop and the demo."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from examples.number_game.game import NUMBERS

STEPS = 50
GROUPS_PER_STEP = 8
GROUP_SIZE = 8
MAX_STALENESS = 2
EPISODES_PER_SECOND = 18

ALGORITHM: dict[str, Any] = {
    "name": "grpo",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "epochs": 4,
    "minibatches": 1,
    "lr": 1e-3,
}

# `archon.toml` of the demo; `data_dir` and `model` are filled in.
CONFIG = (
    """\
data_dir = "{data_dir}"

[gateway]
port = 0

[temporal]
port = 0
ui_port = 0

[policies.default]
model = "{model}"
max_tokens = 1
max_model_len = 64
close_on = "reward"
close_grace = 0.5
late_window = 0
"""
    f"batch_groups = {GROUPS_PER_STEP}\n"
    f"max_staleness = {MAX_STALENESS}\n"
    "max_ahead = 1\n\n"
    "[policies.default.algorithm]\n"
    + "".join(f"{name} = {json.dumps(value)}\n" for name, value in ALGORITHM.items())
)


def tasks(count: int, seed: int = 0) -> list[dict[str, int]]:
    """Targets in shuffled rounds of all the numbers, so that every step sees each of them."""
    rng = random.Random(seed)
    targets: list[int] = []
    while len(targets) < count:
        targets += rng.sample(range(1, NUMBERS + 1), NUMBERS)
    return [{"target": target} for target in targets[:count]]


if __name__ == "__main__":
    for task in tasks(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        print(json.dumps(task))
