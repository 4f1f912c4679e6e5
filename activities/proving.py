"""Giving a replica its weights and proving that it serves them.

Invariant: a replica is proven when its log-probs of the checkpoint's probe agree with the
trainer's, under the version asked for, in a process that still is the same afterwards. An engine
that cannot be reached says nothing about the version; one that refuses the files does.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.checkpoints import read_checkpoint, weights_path
from archon.inference import EngineClient, EngineError, EngineRefused, VersionConflict
from archon.records import PolicyVersion
from archon.settings import Settings

PROVEN, MISMATCH, UNREACHABLE = "proven", "mismatch", "unreachable"


@dataclass(frozen=True)
class Proof:
    """``instance`` is the process that was proven; empty unless it was."""

    outcome: str
    difference: float = math.inf
    instance: str = ""
    reason: str = ""


class Engines:
    """Clients of the replicas, by address, kept open. Belongs to one event loop."""

    def __init__(self, settings: Settings, silence: float = 600.0, connect: float = 2.0) -> None:
        file = settings.secrets_dir / "engine.token"
        self._token = file.read_text().strip() if file.exists() else None
        self._silence, self._connect = silence, connect
        self._clients: dict[str, EngineClient] = {}

    def at(self, url: str) -> EngineClient:
        if url not in self._clients:
            self._clients[url] = EngineClient(
                url, self._token, connect_timeout_s=self._connect, idle_timeout_s=self._silence
            )
        return self._clients[url]

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


async def prove(
    client: EngineClient, version: PolicyVersion, tolerance: float, rollback: bool = False
) -> Proof:
    """Load ``version`` unless it is there, and hold the engine against the trainer's probe."""
    checkpoint = read_checkpoint(Path(version.checkpoint))
    if checkpoint is None:
        return Proof(MISMATCH, reason=f"no checkpoint.json in {version.checkpoint}")
    number, path = version.version, str(weights_path(version))
    try:
        await client.update(number, path, version.model_sha256, rollback)
        difference = await _difference(client, checkpoint["probe"], number)
        now = await client.versions()
    except VersionConflict as error:
        return Proof(UNREACHABLE, reason=str(error))
    except EngineRefused as error:
        return Proof(MISMATCH, reason=str(error))
    except EngineError as error:
        return Proof(UNREACHABLE, reason=str(error))
    if now.version != number:
        return Proof(UNREACHABLE, reason=f"{version.version} was replaced by {now.version}")
    if not difference <= tolerance:
        return Proof(
            MISMATCH,
            difference,
            reason=f"log-probs differ by {difference:.3g} from the trainer's, more than "
            f"probe_tolerance = {tolerance:g}",
        )
    return Proof(PROVEN, difference, now.instance)


async def _difference(client: EngineClient, probe: dict[str, list[Any]], version: int) -> float:
    """The largest difference of log-probs; infinite where the engine answers for other weights."""
    answer = await client.prompt_logprobs(tuple(probe["token_ids"]))
    expected = probe["logprobs"]
    if answer.version != version or len(answer.logprobs) != len(expected):
        return math.inf
    differences = [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
    return max(math.inf if math.isnan(d) else d for d in differences)
