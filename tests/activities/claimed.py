"""A claimed manifest with its samples in Postgres, small enough to be checked by eye."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from archon.records import (
    AlgorithmSettings,
    BatchManifest,
    ReturnRef,
    Sample,
    SampleRef,
    SampleState,
    dumps,
    system_clock,
)
from archon.storage import Database
from archon.storage import tables as t
from archon.storage.rows import insert_record
from archon.storage.steps import body_digest
from tests.rollout.history import POLICY, TENANT

COLUMNS = ("tokens", "mask", "logprobs", "versions", "interaction")


def make_sample(name: str, group: str, manifest_id: str, version: int = 0) -> Sample:
    """Six tokens: two prompt, two sampled by call a, one prompt, one sampled by call b."""
    arrays: dict[str, Any] = {
        "tokens": np.array([3, 4, 5, 6, 7, 8], "<i4"),
        "mask": np.array([0, 0, 1, 1, 0, 1], "u1"),
        "logprobs": np.array([0, 0, -1.5, -2.0, 0, -2.5], "<f4"),
        "versions": np.array([-1, -1, version, version, -1, version], "<i4"),
        "interaction": np.array([-1, -1, 0, 0, -1, 1], "<i4"),
    }
    data = {column: arrays[column].tobytes() for column in COLUMNS}
    return Sample(
        sample_id=name,
        session_id=f"ses_{name}",
        group_id=group,
        tenant_id=TENANT,
        policy_id=POLICY,
        state=SampleState.CLAIMED,
        interactions=[f"int_{name}_a", f"int_{name}_b"],
        n_tokens=6,
        n_trainable=3,
        min_version=version,
        max_version=version,
        digest=hashlib.sha256(b"".join(data.values())).hexdigest(),
        created_at=system_clock(),
        manifest_id=manifest_id,
        **data,
    )


def make_manifest(samples: list[Sample], manifest_id: str, **changes: Any) -> BatchManifest:
    """Every second session was paid 1."""
    refs = [
        SampleRef(
            s.sample_id, s.session_id, s.group_id, s.digest, s.n_tokens, s.n_trainable,
            s.min_version, s.max_version,
            tuple(ReturnRef(name, float(at % 2), 1) for name in s.interactions),
        )
        for at, s in enumerate(samples)
    ]  # fmt: skip
    manifest = BatchManifest(
        manifest_id=manifest_id,
        tenant_id=TENANT,
        policy_id=POLICY,
        kind="fresh",
        base_version=0,
        base_checkpoint="base",
        base_digest="sha0",
        parents=(0,),
        samples=tuple(refs),
        baseline=None,
        algorithm=AlgorithmSettings(epochs=2),
        max_staleness=2,
        codec_digest="codec",
        engine_build="test",
        seed=1,
        created_at=system_clock().isoformat(),
    )
    return replace(manifest, **changes)


async def write_manifest(db: Database, manifest: BatchManifest, digest: str | None = None) -> None:
    body = dumps(manifest)
    async with db.begin() as c:
        await c.execute(
            sa.insert(t.manifest).values(
                manifest_id=manifest.manifest_id,
                tenant_id=manifest.tenant_id,
                policy_id=manifest.policy_id,
                base_version=manifest.base_version,
                state="claimed",
                body=body,
                digest=digest or body_digest(body),
                created_at=system_clock(),
            )
        )


async def claim(
    db: Database, manifest_id: str = "man_1", size: int = 4, version: int = 0, **changes: Any
) -> BatchManifest:
    """One group of ``size`` sessions, bound to a manifest."""
    samples = [
        make_sample(f"smp_{manifest_id}_{at}", f"grp_{manifest_id}", manifest_id, version)
        for at in range(size)
    ]
    manifest = make_manifest(samples, manifest_id, **changes)
    async with db.begin() as c:
        for sample in samples:
            await c.execute(insert_record(t.sample, sample))
    await write_manifest(db, manifest)
    return manifest
