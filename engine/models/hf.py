"""Hugging Face folders in and out, parameter by parameter, bit for bit.

Every tensor of the file lands in exactly one parameter and every parameter is filled: a missing,
unknown or misshapen tensor is refused with its name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model in `folder`, in `dtype`, on the CPU."""
    config = ModelConfig.load(folder)
    tensors = read_tensors(folder)
    with torch.device("meta"):
        model = Decoder(config)
    check_tensors(model, tensors, str(folder))
    # `clone` parts us from the file's memory map, which `archon gc` may take away.
    owned = {name: tensor.to(dtype).clone() for name, tensor in tensors.items()}
    model.load_state_dict(owned, assign=True)
    model.requires_grad_(True)
    return model


def save(model: Decoder, folder: str | Path, raw_config: Mapping[str, Any] | None = None) -> None:
    """`config.json` and `model.safetensors`; the bytes depend on config and parameters only.

    `raw_config` is the config that the model came with: its keys that mean nothing to us (token
    ids, say) are kept.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    raw = dict(raw_config or model.config.to_hf()) | {"torch_dtype": dtype}
    raw.pop("dtype", None)
    assert ModelConfig.from_hf(raw) == dataclasses.replace(model.config, torch_dtype=dtype)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # the library makes it 0600, and others must read it


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        return load_file(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise ValueError(f"no {WEIGHTS} in {folder}")
    placed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(placed.values())):
        tensors.update(load_file(folder / shard))
    lost = sorted(placed.keys() - tensors.keys())
    if lost:
        raise ValueError(f"{folder}: the index names tensors that no shard has: {lost[:5]}")
    return tensors


def check_tensors(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - expected.keys())
    if missing:
        raise ValueError(f"{source}: missing tensors {missing[:5]}")
    if unknown:
        raise ValueError(f"{source}: unknown tensors {unknown[:5]}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{source}: {name} has shape {list(tensors[name].shape)}, not {list(shape)}"
            )
