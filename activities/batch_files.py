"""The files of one training step: its manifest and its batch, as the engine reads them.

Invariant: the batch that is written is the batch that the manifest names, byte for byte: each
sample's digest is computed again here, and a sampled token older than the manifest allows, or from
outside of its chain of parents, refuses the whole batch.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from archon.records import BatchManifest, Sample, SampleRef

_DTYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype("<i4"),
    "mask": np.dtype("u1"),
    "logprobs": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
    "interaction": np.dtype("<i4"),
}
Arrays = dict[str, NDArray[Any]]


class BadBatch(ValueError):
    """The manifest and the rows disagree; trying again cannot help."""


class StaleBatch(ValueError):
    """A token is older than ``max_staleness`` allows, or was sampled off the chain of parents."""


def batch_arrays(manifest: BatchManifest, samples: Mapping[str, Sample]) -> Arrays:
    """The ragged concatenation of the manifest's samples, in its order."""
    if not manifest.samples:
        raise BadBatch(f"manifest {manifest.manifest_id} names no samples")
    parts = [_checked(ref, samples.get(ref.sample_id), manifest) for ref in manifest.samples]
    arrays: Arrays = {name: np.concatenate([p[name] for p in parts]) for name in _DTYPES}
    lengths = [len(p["tokens"]) for p in parts]
    arrays["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    _check_staleness(manifest, arrays)
    return arrays


def _checked(ref: SampleRef, sample: Sample | None, manifest: BatchManifest) -> Arrays:
    what = f"sample {ref.sample_id} of manifest {manifest.manifest_id}"
    if sample is None:
        raise BadBatch(f"{what} is not bound to it: drop the manifest")
    arrays: Arrays = {}
    digest = hashlib.sha256()
    for name, dtype in _DTYPES.items():
        data = getattr(sample, name)
        digest.update(data)
        if len(data) != ref.n_tokens * dtype.itemsize:
            raise BadBatch(f"{what}: {name} has {len(data)} bytes for {ref.n_tokens} tokens")
        arrays[name] = np.frombuffer(data, dtype)
    if digest.hexdigest() != ref.digest:
        raise BadBatch(f"{what} has digest {digest.hexdigest()}, the manifest says {ref.digest}")
    if (named := [r.interaction_id for r in ref.returns]) != sample.interactions:
        raise BadBatch(f"{what} has interactions {sample.interactions}, its returns are of {named}")
    return arrays


def _check_staleness(manifest: BatchManifest, arrays: Arrays) -> None:
    trained = np.unique(arrays["versions"][arrays["mask"] == 1])
    fresh = set(manifest.parents[: manifest.max_staleness + 1])
    if manifest.parents[:1] != (manifest.base_version,):
        raise BadBatch(
            f"manifest {manifest.manifest_id}: parents {manifest.parents} do not begin with "
            f"its base {manifest.base_version}"
        )
    if manifest.kind == "replay":
        return
    if stale := sorted({int(v) for v in trained} - fresh):
        raise StaleBatch(
            f"manifest {manifest.manifest_id}: tokens of versions {stale} are not among "
            f"{sorted(fresh)}, all that max_staleness = {manifest.max_staleness} allows on "
            f"base {manifest.base_version}: drop the manifest"
        )


def write_batch(folder: Path, attempt: str, body: str, arrays: Arrays) -> tuple[Path, Path]:
    """Write manifest and batch; a reader sees a file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest, batch = folder / "manifest.json", folder / "batch.safetensors"
    aside = folder / f".{attempt}.json"
    aside.write_text(body)
    aside.replace(manifest)
    aside = folder / f".{attempt}.safetensors"
    save_file(arrays, aside)
    aside.replace(batch)
    return manifest, batch
