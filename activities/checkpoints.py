"""Where checkpoints are, and what their ``checkpoint.json`` says.

Invariant: a checkpoint exists exactly when its ``checkpoint.json`` does; the engine writes that
file last, by an atomic rename.
"""

import json
from pathlib import Path
from typing import Any

from archon.records import PolicyVersion
from archon.settings import Settings

INITIAL = "initial"


def checkpoint_folder(settings: Settings, tenant_id: str, policy_id: str, name: str) -> Path:
    """The folder of a manifest's checkpoint; ``INITIAL`` names that of version 0."""
    return settings.checkpoints_dir / tenant_id / policy_id / name


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The content of a published checkpoint, or None where there is none yet."""
    try:
        text = (folder / "checkpoint.json").read_text()
    except FileNotFoundError:
        return None
    checkpoint: dict[str, Any] = json.loads(text)
    return checkpoint


def weights_path(version: PolicyVersion) -> Path:
    """The Hugging Face folder of a version, as a replica loads it."""
    return Path(version.checkpoint) / version.weights
