"""The trainer's operations. What is in memory is used only where it is what the step starts from.

Invariant: the state in memory is named by the digest of the checkpoint that it equals, and by none
from the moment that a step may change it until its checkpoint is published.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from engine import checkpoint
from engine.checkpoint import Checkpoint, TrainerState
from engine.models import hf
from engine.training.batch import read_batch, read_manifest
from engine.training.probe import probe
from engine.training.step import Progress, Spans, train_step


class Trainer:
    def __init__(self) -> None:
        self.state: TrainerState | None = None
        self.digest: tuple[str, str] | None = None

    def init(self, model: str, out: str, attempt: str) -> dict[str, Any]:
        """Version 0: the weights of a Hugging Face folder with a fresh optimizer."""
        self.digest = None
        self.state = checkpoint.fresh_state(hf.load(model, torch.float32))
        made = self._publish(self.state, out, attempt, Path(model), {})
        return {"event": "done", "checkpoint": dataclasses.asdict(made)}

    def step(
        self, manifest: str, batch: str, base: str, out: str, attempt: str, progress: Progress
    ) -> dict[str, Any]:
        spans = Spans()
        with spans("load"):
            found = read_manifest(manifest)
            origin = checkpoint.read(base)
            if found.base_digest != origin.model_sha256:
                raise ValueError(
                    f"manifest {found.manifest_id}: base_digest {found.base_digest} is not the "
                    f"model_sha256 {origin.model_sha256} of {base}"
                )
            state = self._state(origin, base)
            inputs = read_batch(batch, found, state.model.config.vocab_size)
        if reason := _empty(inputs.trained_tokens, inputs.signal):
            return {"event": "empty_signal", "reason": f"manifest {found.manifest_id}: {reason}"}
        self.digest = None
        metrics = train_step(state, inputs, found.algorithm, found.seed, progress, spans)
        with spans("save"):
            made = self._publish(state, out, attempt, Path(base) / origin.weights, metrics)
        return {
            "event": "done",
            "checkpoint": dataclasses.asdict(made),
            "metrics": metrics,
            "spans": spans.seconds,
        }

    def _state(self, origin: Checkpoint, base: str) -> TrainerState:
        if self.state is None or self.digest != origin.digest:
            self.digest = None
            _, self.state = checkpoint.load(base)
            self.digest = origin.digest
        return self.state

    def _publish(
        self, state: TrainerState, out: str, attempt: str, side: Path, metrics: dict[str, float]
    ) -> Checkpoint:
        made = checkpoint.publish(
            out, attempt, state, side_files=side, probe=probe(state.model), metrics=metrics
        )
        self.digest = made.digest
        return made


def _empty(trained_tokens: int, signal: bool) -> str:
    if not trained_tokens:
        return "no token can be trained"
    return "" if signal else "every advantage is 0: all returns of each group are equal"
