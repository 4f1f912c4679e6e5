"""What an agent run is made of: keys, groups, sessions, interactions, rewards.

Invariant: these are values. A row is read into one, and a change is a new row or an UPDATE that
names the state that it expects.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class KeyScope(StrEnum):
    ADMIN = "admin"
    TENANT = "tenant"
    SESSION = "session"


class SessionState(StrEnum):
    """``open`` takes calls; ``closed`` takes none and waits for credit; ``sealed`` has its samples.

    ``unscored``: closed and no reward came in time; ``empty``: closed without a trainable call.
    A late reward takes ``unscored`` back to ``closed`` and gives ``sealed`` a new revision.
    """

    OPEN = "open"
    CLOSED = "closed"
    SEALED = "sealed"
    UNSCORED = "unscored"
    EMPTY = "empty"


class CloseReason(StrEnum):
    """``lost``: the agent run failed; the session is no member of its group any more."""

    REWARD = "reward"
    END = "end"
    IDLE = "idle"
    REFRESH = "refresh"
    TIMEOUT = "timeout"
    LOST = "lost"


class GroupState(StrEnum):
    """``open`` waits for members; ``ready`` may be claimed; ``claimed``: bound; ``done``: over."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    DONE = "done"


class InteractionStatus(StrEnum):
    """Only ``complete`` interactions are trained on."""

    COMPLETE = "complete"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    SIDE_CALL = "side_call"
    FAILED = "failed"


class Support(StrEnum):
    """From what a token was sampled: the whole softmax, one legal token, or a truncated softmax."""

    FULL = "full"
    FORCED = "forced"
    TRUNCATED = "truncated"


@dataclass(frozen=True)
class VersionRange:
    """Output tokens ``start <= i < end`` were sampled by weights ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Key:
    """An API key. Only the SHA-256 of the secret is kept. ``session`` keys name an episode slot."""

    key_hash: str
    tenant_id: str
    policy_id: str
    scope: KeyScope
    label: str
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


@dataclass(frozen=True)
class Group:
    """One planned instance of a task with ``size`` rollouts."""

    group_id: str
    tenant_id: str
    policy_id: str
    task_id: str
    size: int
    state: GroupState
    created_at: datetime
    deadline: datetime | None = None


@dataclass(frozen=True)
class Session:
    """One episode of one agent run. ``slot`` is the hash of the key that it was opened under."""

    session_id: str
    tenant_id: str
    policy_id: str
    group_id: str
    slot: str
    state: SessionState
    created_at: datetime
    task_id: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    close_reason: str = ""
    close_after: datetime | None = None
    closed_at: datetime | None = None
    sealed_at: datetime | None = None
    sealed_reward_seq: int = 0
    last_call_at: datetime | None = None
    trainable: bool = True


@dataclass(frozen=True)
class Interaction:
    """One captured LLM call: exactly the ids that the engine saw and sampled.

    ``prompt_ids`` holds only what follows the prefix of ``prefix_parent`` (its whole prompt and
    output); ``prompt_sha256`` is of the whole prompt as int32 little-endian, ``prompt_length`` its
    length. ``output_ids`` int32, ``logprobs`` float32, both little-endian and equally long.
    ``support`` is one byte per output token: 0 full, 1 forced, 2 truncated.
    ``messages_digest`` names the conversation up to and including the answer.
    """

    interaction_id: str
    session_id: str
    tenant_id: str
    policy_id: str
    seq: int
    status: InteractionStatus
    protocol: str
    request_digest: str
    messages_digest: str
    prompt_ids: bytes
    prompt_length: int
    prompt_sha256: str
    output_ids: bytes
    logprobs: bytes
    support: bytes
    versions: list[dict[str, int]]
    sampling: dict[str, object]
    finish_reason: str
    started_at: datetime
    ended_at: datetime
    prefix_parent: str | None = None
    previous: str | None = None
    replica_id: str = ""
    evidence_gaps: list[str] = field(default_factory=list)
    codec_digest: str = ""
    messages: list[dict[str, object]] = field(default_factory=list)
    answer: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Reward:
    """One delivered reward. It fills the slot (session, interaction or none, component, source).

    The newest ``seq`` of a slot counts. ``rejected`` says why a value was kept but not counted.
    """

    reward_id: str
    session_id: str
    tenant_id: str
    policy_id: str
    component: str
    source: str
    created_at: datetime
    value: float | None
    interaction_id: str | None = None
    idempotency_key: str | None = None
    rejected: str = ""
    raw: str = ""
    seq: int = 0
