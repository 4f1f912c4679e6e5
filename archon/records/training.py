"""What a training step takes in and gives out.

Invariant: a :class:`BatchManifest` alone determines a step. It is copied whole at the claim and
never changed after; only its row's state moves.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from archon.records.policy import AlgorithmSettings


class SampleState(StrEnum):
    """free → claimed(manifest) → trained | dropped(reason)."""

    FREE = "free"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"


class ManifestState(StrEnum):
    """``failed`` keeps its samples bound until a ``retry`` or a ``drop``."""

    CLAIMED = "claimed"
    COMMITTED = "committed"
    FAILED = "failed"
    DROPPED = "dropped"


class VersionState(StrEnum):
    TRAINED = "trained"
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True)
class Sample:
    """A packed sequence to train on: one root-to-leaf branch of a session, or one interaction.

    All arrays have ``n_tokens`` entries, little-endian: ``tokens`` int32; ``mask`` uint8, 1 where
    the token was sampled and may be trained here; ``logprobs`` float32, of the behaviour, 0
    elsewhere; ``versions`` int32, −1 where not sampled; ``interaction`` int32, the index into
    ``interactions``, −1 elsewhere. ``digest`` is the SHA-256 over these five in this order.
    """

    sample_id: str
    session_id: str
    group_id: str
    tenant_id: str
    policy_id: str
    state: SampleState
    interactions: list[str]
    n_tokens: int
    n_trainable: int
    min_version: int
    max_version: int
    tokens: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    interaction: bytes
    digest: str
    created_at: datetime
    manifest_id: str | None = None
    drop_reason: str = ""


@dataclass(frozen=True)
class Return:
    """The return of one interaction, per revision; the highest revision counts."""

    interaction_id: str
    revision: int
    session_id: str
    tenant_id: str
    policy_id: str
    value: float
    reward_seq: int
    created_at: datetime


@dataclass(frozen=True)
class ReturnRef:
    interaction_id: str
    value: float
    revision: int


@dataclass(frozen=True)
class SampleRef:
    """A sample as a manifest names it: by id and digest, with the returns that feed the step."""

    sample_id: str
    session_id: str
    group_id: str
    digest: str
    n_tokens: int
    n_trainable: int
    min_version: int
    max_version: int
    returns: tuple[ReturnRef, ...]


@dataclass(frozen=True)
class BatchManifest:
    """Whole groups in order, and everything else that determines the step.

    ``parents`` is the chain of versions from ``base_version`` back to the oldest version that
    sampled a token of the batch; staleness is counted along it.
    """

    manifest_id: str
    tenant_id: str
    policy_id: str
    kind: str
    base_version: int
    base_checkpoint: str
    base_digest: str
    parents: tuple[int, ...]
    samples: tuple[SampleRef, ...]
    baseline: float | None
    algorithm: AlgorithmSettings
    max_staleness: int
    codec_digest: str
    engine_build: str
    seed: int
    created_at: str
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyVersion:
    """One committed step. ``checkpoint`` is the folder that holds its ``checkpoint.json``."""

    tenant_id: str
    policy_id: str
    version: int
    parent: int | None
    state: VersionState
    checkpoint: str
    weights: str
    model_sha256: str
    created_at: datetime
    manifest_id: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    live_at: datetime | None = None
    decision: dict[str, object] = field(default_factory=dict)
