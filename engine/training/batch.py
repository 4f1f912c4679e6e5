"""A step's input, checked against its manifest and turned into tensors.

Invariant: what is trained is what the manifest names. Every sample's digest, every length and every
index is checked before a gradient is computed; a token is trained under the advantage of the
interaction that sampled it, and an interaction is trained in one sample only.

Shapes: T packed tokens of the batch, A trained tokens in order, S samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from archon.records.policy import AlgorithmSettings
from archon.records.training import BatchManifest, SampleRef
from archon.records.wire import loads
from engine.algorithms import advantages
from engine.algorithms.advantages import Scored

COLUMNS = {
    "tokens": torch.int32,
    "mask": torch.uint8,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "interaction": torch.int32,
}


@dataclass(frozen=True)
class Batch:
    """`trained_T` marks the tokens of the loss; the label at t is token t, predicted from t−1."""

    bounds: tuple[int, ...]
    tokens_T: Tensor
    trained_T: Tensor
    behaviour_T: Tensor
    advantage_T: Tensor
    metrics: dict[str, float]
    signal: bool

    @property
    def trained_tokens(self) -> int:
        return int(self.trained_T.sum())


def read_manifest(path: str | Path) -> BatchManifest:
    return loads(BatchManifest, Path(path).read_text())


def read_batch(path: str | Path, manifest: BatchManifest, vocab_size: int) -> Batch:
    return build(load_file(path), manifest, vocab_size)


def build(columns: dict[str, Tensor], manifest: BatchManifest, vocab_size: int) -> Batch:
    bounds = _check_shapes(columns, manifest.samples)
    _check_samples(columns, manifest.samples, bounds)
    _check_values(columns, bounds, vocab_size)
    staleness = _staleness(columns, manifest)
    trained_T = columns["mask"] == 1
    advantage_T, metrics, signal = _advantages(columns, manifest, bounds)
    return Batch(
        bounds=bounds,
        tokens_T=columns["tokens"].long(),
        trained_T=trained_T,
        behaviour_T=columns["logprobs"],
        advantage_T=advantage_T,
        metrics=metrics | staleness,
        signal=signal,
    )


def _check_shapes(columns: dict[str, Tensor], samples: Sequence[SampleRef]) -> tuple[int, ...]:
    wanted = COLUMNS | {"offsets": torch.int64}
    found = {name: tensor.dtype for name, tensor in columns.items()}
    if found != wanted:
        raise ValueError(f"batch columns are {found}, not {wanted}")
    bounds = tuple(columns["offsets"].tolist())
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[:1] != (0,) or lengths != [sample.n_tokens for sample in samples]:
        raise ValueError(
            f"batch offsets give {len(lengths)} samples of {sum(lengths)} tokens, the manifest "
            f"names {len(samples)} of {sum(sample.n_tokens for sample in samples)}"
        )
    for name in COLUMNS:
        if columns[name].shape != (bounds[-1],):
            raise ValueError(f"batch column {name} has shape {list(columns[name].shape)}")
    return bounds


def _check_samples(
    columns: dict[str, Tensor], samples: Sequence[SampleRef], bounds: tuple[int, ...]
) -> None:
    for sample, (start, end) in zip(samples, pairwise(bounds), strict=True):
        digest = hashlib.sha256()
        for name in COLUMNS:
            digest.update(columns[name][start:end].contiguous().numpy().data)
        if digest.hexdigest() != sample.digest:
            raise ValueError(
                f"sample {sample.sample_id}: digest {digest.hexdigest()}, "
                f"the manifest says {sample.digest}"
            )
        trainable = int(columns["mask"][start:end].sum())
        if trainable != sample.n_trainable:
            raise ValueError(
                f"sample {sample.sample_id}: {trainable} trainable tokens, "
                f"the manifest says {sample.n_trainable}"
            )
        if trainable and columns["mask"][start]:
            raise ValueError(f"sample {sample.sample_id}: its first token has no predictor")


def _check_values(columns: dict[str, Tensor], bounds: tuple[int, ...], vocab_size: int) -> None:
    tokens, mask = columns["tokens"], columns["mask"]
    if bool((mask > 1).any()):
        raise ValueError("batch mask holds other values than 0 and 1")
    if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
        raise ValueError(f"batch holds token ids outside the model's vocabulary of {vocab_size}")
    logprobs = columns["logprobs"][mask == 1]
    if not bool((logprobs.isfinite() & (logprobs <= 1e-4)).all()):
        raise ValueError("a trained token has a log-prob that is not finite or above 0")


def _staleness(columns: dict[str, Tensor], manifest: BatchManifest) -> dict[str, float]:
    """Steps along the parent chain between what sampled a token and the step's base."""
    versions = columns["versions"][columns["mask"] == 1]
    if not len(versions):
        return {"staleness_mean": 0.0, "staleness_max": 0.0}
    distance = {version: at for at, version in enumerate(manifest.parents)}
    unknown = sorted(set(versions.tolist()) - distance.keys())
    if unknown:
        raise ValueError(
            f"manifest {manifest.manifest_id}: tokens of version {unknown[0]}, which is not in "
            f"the parents {list(manifest.parents)} of base {manifest.base_version}"
        )
    found = torch.tensor([distance[version] for version in versions.tolist()], dtype=torch.float64)
    if manifest.kind == "fresh" and found.max() > manifest.max_staleness:
        raise ValueError(
            f"manifest {manifest.manifest_id}: a token is {int(found.max())} steps stale, "
            f"max_staleness is {manifest.max_staleness}"
        )
    return {"staleness_mean": float(found.mean()), "staleness_max": float(found.max())}


def _advantages(
    columns: dict[str, Tensor], manifest: BatchManifest, bounds: tuple[int, ...]
) -> tuple[Tensor, dict[str, float], bool]:
    scored: dict[str, Scored] = {}
    places: list[tuple[str, Tensor]] = []
    for sample, (start, end) in zip(manifest.samples, pairwise(bounds), strict=True):
        index = columns["interaction"][start:end].masked_fill(columns["mask"][start:end] == 0, -1)
        for at in sorted(set(index.tolist()) - {-1}):
            if not 0 <= at < len(sample.returns):
                raise ValueError(f"sample {sample.sample_id}: interaction index {at} is unknown")
            found = sample.returns[at]
            if found.interaction_id in scored:
                raise ValueError(f"interaction {found.interaction_id} is trained in two samples")
            scored[found.interaction_id] = Scored(sample.group_id, sample.session_id, found.value)
            places.append((found.interaction_id, start + (index == at).nonzero().squeeze(1)))
        if bool(((columns["mask"][start:end] == 1) & (index < 0)).any()):
            raise ValueError(f"sample {sample.sample_id}: a trained token has no interaction")
    values = _by_algorithm(list(scored.values()), manifest.algorithm, manifest.baseline)
    advantage_of = dict(zip(scored, values, strict=True))
    advantage_T = torch.zeros(bounds[-1], dtype=torch.float32)
    for interaction_id, at_A in places:
        advantage_T[at_A] = advantage_of[interaction_id]
    return advantage_T, _summary(list(scored.values()), values), not advantages.all_zero(values)


def _by_algorithm(
    scored: list[Scored], algorithm: AlgorithmSettings, baseline: float | None
) -> list[float]:
    if algorithm.name == "grpo":
        return advantages.grpo(scored, baseline, normalize_std=algorithm.normalize_std)
    if algorithm.name == "rloo":
        return advantages.rloo(scored, baseline)
    raise ValueError(f"algorithm {algorithm.name!r} is unknown: grpo or rloo")


def _summary(scored: list[Scored], values: list[float]) -> dict[str, float]:
    sessions: dict[str, list[float]] = {}
    live: set[str] = set()
    for item, value in zip(scored, values, strict=True):
        sessions.setdefault(item.session_id, []).append(item.value)
        if value:
            live.add(item.group_id)
    groups = {item.group_id for item in scored}
    means = [sum(found) / len(found) for found in sessions.values()]
    return {
        "sessions": float(len(sessions)),
        "groups": float(len(groups)),
        "groups_without_signal": float(len(groups - live)),
        "return_mean": sum(means) / len(means) if means else 0.0,
        "advantage_max": max((abs(value) for value in values), default=0.0),
    }
