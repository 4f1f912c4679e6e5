"""A policy small enough for any test: the number game's model, and settings that go with it."""

import dataclasses
from pathlib import Path
from typing import Any

from archon.records import PolicySettings


def tiny_policy(folder: Path, seed: int = 0, **changes: Any) -> PolicySettings:
    """Write the model to ``folder``; its settings, two groups a batch and no waiting."""
    from examples.number_game.model import write_policy

    write_policy(folder, seed)
    settings = PolicySettings(
        model=str(folder), max_tokens=1, max_model_len=64, batch_groups=2, close_grace=0.0,
        late_window=0.0,
    )  # fmt: skip
    return dataclasses.replace(settings, **changes)
