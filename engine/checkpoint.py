"""Checkpoints on a local folder: written aside, published by one atomic file.

Invariant: `checkpoint.json` appears whole or not at all, only after every file that it names is on
disk, and is never replaced. Of two attempts at one step the first to publish wins; the other must
have made the same tensors, bit for bit, and answers with the winner's.

    CKPT_DIR/checkpoint.json
    CKPT_DIR/<attempt>/weights/{config.json,model.safetensors,tokenizer files}
    CKPT_DIR/<attempt>/{optimizer.safetensors,state.json}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archon.failpoints import failpoint
from engine.models import Decoder, hf

FORMAT = 1
MANIFEST = "checkpoint.json"
MODEL_FILE = re.compile(r"\.(safetensors|bin|pt|pth|gguf)$|\.index\.json$|^config\.json$")
MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or another than it must be."""


@dataclass(frozen=True)
class Checkpoint:
    """What `checkpoint.json` says. `step` counts training steps from the first weights."""

    format: int
    attempt: str
    weights: str
    model_sha256: str
    optimizer_sha256: str
    tensor_hashes: dict[str, str]
    step: int
    metrics: dict[str, float]
    probe: dict[str, Any]

    @property
    def digest(self) -> tuple[str, str]:
        return self.model_sha256, self.optimizer_sha256


@dataclass
class TrainerState:
    """All that a step changes."""

    model: Decoder
    optimizer: torch.optim.AdamW
    step: int


def fresh_state(model: Decoder) -> TrainerState:
    return TrainerState(model, make_optimizer(model, _zero_moments(model)), 0)


def read(folder: str | Path) -> Checkpoint:
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"no {MANIFEST} in {folder}: nothing was published there")
    raw = json.loads(path.read_text())
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {raw.get('format')!r}, this build reads {FORMAT}")
    return Checkpoint(**raw)


def load(folder: str | Path) -> tuple[Checkpoint, TrainerState]:
    """The state that was published in `folder`, once its files are what they were then."""
    folder = Path(folder)
    found = read(folder)
    attempt = folder / found.attempt
    _verify(folder / found.weights / hf.WEIGHTS, found.model_sha256)
    _verify(attempt / "optimizer.safetensors", found.optimizer_sha256)
    model = hf.load(folder / found.weights, torch.float32)
    moments = load_file(attempt / "optimizer.safetensors")
    return found, TrainerState(model, make_optimizer(model, moments), found.step)


def publish(
    folder: str | Path,
    attempt: str,
    state: TrainerState,
    *,
    side_files: Path,
    probe: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Checkpoint:
    """Write `state` under `folder/attempt` and publish it, or answer with what is published.

    `side_files` is the model folder that tokenizer and config are copied from.
    """
    folder = Path(folder)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", attempt):
        raise CheckpointError(f"attempt {attempt!r}: letters, digits, '.', '_' and '-' only")
    moments = optimizer_tensors(state)
    hashes = _tensor_hashes(state.model.state_dict(), moments)
    if (folder / MANIFEST).exists():
        return _published_before(folder, hashes)
    _write_files(folder / attempt, state, moments, side_files)
    made = Checkpoint(
        format=FORMAT,
        attempt=attempt,
        weights=f"{attempt}/weights",
        model_sha256=_file_sha256(folder / attempt / "weights" / hf.WEIGHTS),
        optimizer_sha256=_file_sha256(folder / attempt / "optimizer.safetensors"),
        tensor_hashes=hashes,
        step=state.step,
        metrics=dict(metrics),
        probe=dict(probe),
    )
    failpoint("trainer.before_publish")
    if not _create_manifest(folder, made):
        shutil.rmtree(folder / attempt)
        return _published_before(folder, hashes)
    failpoint("trainer.after_publish")
    return made


def make_optimizer(model: Decoder, moments: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """AdamW in the given state. Each step sets its own lr, betas, eps and weight decay."""
    parameters = dict(model.named_parameters())
    expected = {f"{moment}.{name}" for name in parameters for moment in MOMENTS} | {"step"}
    if expected != moments.keys():
        raise CheckpointError(
            f"optimizer state does not fit the model: {sorted(expected ^ moments.keys())[:5]}"
        )
    optimizer = torch.optim.AdamW(parameters.values(), fused=True)
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            "step": moments["step"].reshape(()).to(torch.float32).clone(),
            **{moment: moments[f"{moment}.{name}"].clone() for moment in MOMENTS},
        }
    return optimizer


def optimizer_tensors(state: TrainerState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in state.model.named_parameters():
        held = state.optimizer.state[parameter]
        found |= {f"{moment}.{name}": held[moment] for moment in MOMENTS}
        found["step"] = held["step"].reshape(1)
    return found


def _zero_moments(model: Decoder) -> dict[str, Tensor]:
    found = {
        f"{moment}.{name}": torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        for name, parameter in model.named_parameters()
        for moment in MOMENTS
    }
    return {name: tensor.detach() for name, tensor in found.items()} | {"step": torch.zeros(1)}


def _write_files(
    attempt: Path, state: TrainerState, moments: dict[str, Tensor], side_files: Path
) -> None:
    if attempt.exists():  # left behind, unpublished, by a process that died in this attempt
        shutil.rmtree(attempt)
    weights = attempt / "weights"
    raw_config = json.loads((side_files / "config.json").read_text())
    hf.save(state.model, weights, raw_config)
    for source in sorted(side_files.iterdir()):
        if source.is_file() and not MODEL_FILE.search(source.name):
            shutil.copyfile(source, weights / source.name)
    save_file(moments, attempt / "optimizer.safetensors")
    (attempt / "state.json").write_text(json.dumps({"format": FORMAT, "step": state.step}) + "\n")
    for path in [*weights.iterdir(), *attempt.iterdir(), attempt, attempt.parent]:
        _fsync(path)


def _create_manifest(folder: Path, made: Checkpoint) -> bool:
    """False where another attempt was first."""
    aside = folder / f".{MANIFEST}.{made.attempt}"
    aside.write_text(json.dumps(dataclasses.asdict(made), indent=1, sort_keys=True) + "\n")
    _fsync(aside)
    try:
        (folder / MANIFEST).hardlink_to(aside)
    except FileExistsError:
        return False
    finally:
        aside.unlink()
    _fsync(folder)
    return True


def _published_before(folder: Path, hashes: dict[str, str]) -> Checkpoint:
    found = read(folder)
    if found.tensor_hashes != hashes:
        differing = sorted(
            name
            for name in found.tensor_hashes.keys() | hashes.keys()
            if found.tensor_hashes.get(name) != hashes.get(name)
        )
        raise CheckpointError(
            f"{folder}: attempt {found.attempt} published other tensors than this one made: "
            f"{len(differing)} differ, first {differing[0]}; the step is not deterministic or "
            "the folder belongs to another step"
        )
    return found


def _tensor_hashes(model: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> dict[str, str]:
    named = dict(model) | {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    return {
        name: hashlib.sha256(
            tensor.detach().contiguous().view(torch.uint8).numpy().data
        ).hexdigest()
        for name, tensor in named.items()
    }


def _verify(path: Path, sha256: str) -> None:
    found = _file_sha256(path)
    if found != sha256:
        raise CheckpointError(f"{path}: sha256 {found}, published as {sha256}: damaged")


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(size):
            yield chunk


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
