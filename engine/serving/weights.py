"""Weights from a folder, loaded beside those that serve.

Invariant: what this returns is whole: its digest is the one that was asked for, every tensor is
there with its shape, and every number is finite. Anything else raises, and nothing has changed.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.models import ModelConfig, hf
from engine.serving.fused import FusedDecoder
from engine.serving.wire import Refusal


@dataclass(frozen=True, slots=True)
class Weights:
    decoder: FusedDecoder
    version: int
    sha256: str
    positions: int
    """The longest context, prompt and answer together."""


def digest(folder: Path) -> str:
    """SHA-256 of `model.safetensors`; with shards, of all of them in the order of their names."""
    whole = folder / hf.WEIGHTS
    files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise Refusal(400, f"no safetensors in {folder}")
    sha256 = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
    return sha256.hexdigest()


def load(
    folder: Path,
    version: int,
    sha256: str | None,
    dtype: torch.dtype,
    max_model_len: int,
    serving: ModelConfig | None,
) -> Weights:
    """`serving` is the model that the engine is bound to, once it has one."""
    if not folder.is_dir():
        raise Refusal(400, f"no folder {folder} with the weights of version {version}")
    found = digest(folder)
    if sha256 is not None and found != sha256:
        raise Refusal(400, f"version {version}: {folder} has digest {found}, not {sha256}")
    try:
        decoder = hf.load(folder, dtype)
    except (ValueError, OSError, SafetensorError) as e:
        raise Refusal(400, f"version {version}: {e}") from e
    if serving is not None and _model(decoder.config) != _model(serving):
        raise Refusal(
            400,
            f"version {version}: {folder} is another model than the one served; "
            "start an engine of its own for it",
        )
    for name, parameter in decoder.named_parameters():
        if not torch.isfinite(parameter).all():
            raise Refusal(400, f"version {version}: {name} has numbers that are not finite")
    positions = min(max_model_len, decoder.config.max_position_embeddings)
    return Weights(FusedDecoder(decoder, positions), version, found, positions)


def _model(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, torch_dtype="float32")
