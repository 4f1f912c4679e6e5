"""What goes in and out of workflows and activities: ids and verdicts, never tokens.

Invariant: every message is one frozen dataclass of JSON values; whatever is large is named by key
and digest. Workflow ids and task queues are made here and nowhere else.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any

ATTR_TENANT, ATTR_POLICY, ATTR_STATUS = "TenantId", "PolicyId", "ArchonStatus"
ATTR_SESSION, ATTR_VERSION, ATTR_ATTENTION = "SessionId", "PolicyVersion", "Attention"


def session_workflow_id(session_id: str) -> str:
    return f"session-{session_id}"


def policy_workflow_id(tenant_id: str, policy_id: str) -> str:
    return f"policy-{tenant_id}-{policy_id}"


def step_workflow_id(manifest_id: str) -> str:
    return f"step-{manifest_id}"


def rollout_workflow_id(tenant_id: str, policy_id: str, version: int) -> str:
    return f"rollout-{tenant_id}-{policy_id}-v{version}"


def episode_workflow_id(run_id: str, index: int) -> str:
    return f"episode-{run_id}-{index}"


def main_queue(prefix: str) -> str:
    """Workflows and the activities that wait for input and output."""
    return f"{prefix}-main"


def trainer_queue(prefix: str) -> str:
    """Training steps: one at a time per worker."""
    return f"{prefix}-trainer"


def agents_queue(prefix: str, run_id: str) -> str:
    """The machine on which the agents of one rollout run."""
    return f"{prefix}-agents-{run_id}"


@dataclass(frozen=True)
class PolicyKey:
    tenant_id: str
    policy_id: str


@dataclass(frozen=True)
class SessionTimes:
    """The part of a policy's settings that a session's workflow obeys, in seconds."""

    close_on: str
    close_grace: float
    idle_timeout: float
    reward_timeout: float
    late_window: float


@dataclass(frozen=True)
class SessionCounts:
    """What a session's workflow carries through continue-as-new beside its input."""

    state: str = "open"
    rewards: int = 0
    rejected: int = 0
    seals: int = 0
    raw_rewards: int = 0
    wait: float = 0.0
    woken: bool = False
    close: bool = False


@dataclass(frozen=True)
class SessionInput:
    """``closed``: the session takes no calls any more, so it is settled at once.

    ``max_history`` continues as new at so many events; 0 leaves it to the server's suggestion.
    """

    session_id: str
    tenant_id: str
    policy_id: str
    times: SessionTimes
    closed: bool = False
    counts: "SessionCounts | None" = None
    max_history: int = 0


@dataclass(frozen=True)
class Wake:
    """The relay's signal: something about the session changed in Postgres; ``what`` is a hint."""

    what: str
    ref: str = ""


@dataclass(frozen=True)
class SessionStatus:
    """The answer to the query ``status`` of a session's workflow."""

    session_id: str
    state: str
    rewards: int
    rejected: int
    seals: int


@dataclass(frozen=True)
class SettleInput:
    """Do what is due for a session; ``close``: somebody asked for its end."""

    session_id: str
    close: bool = False


@dataclass(frozen=True)
class Settled:
    """``state`` is the session's state after; ``reward_seq`` the newest reward that was seen.

    ``wait``: seconds until there may be something to do again, while it is open or unscored.
    ``revision``: of the returns that this call wrote, 0 where it wrote none; ``late`` says that
    they came after the samples were bound to a step.
    """

    state: str
    wait: float = 0.0
    reward_seq: int = 0
    rewards: int = 0
    rejected: int = 0
    samples: int = 0
    revision: int = 0
    late: bool = False


@dataclass(frozen=True)
class RawReward:
    """A reward as it came from Temporal's own clients, as JSON text; ``key`` makes it once."""

    session_id: str
    raw: str
    key: str


@dataclass(frozen=True)
class RewardReceipt:
    """``rejected`` says why the value was kept but is not counted."""

    reward_id: str
    value: float | None
    rejected: str = ""


@dataclass(frozen=True)
class PolicyInput:
    """Carried through continue-as-new. ``max_steps`` = 0 trains without end.

    ``to_roll`` is the newest version that wants to be rolled out, ``rolled`` the newest that was.
    """

    tenant_id: str
    policy_id: str
    queue_prefix: str
    paused: bool = False
    max_steps: int = 0
    steps: int = 0
    waiting_manifest: str = ""
    to_roll: int = 0
    rolled: int = 0
    step_timeout: float = 3600.0
    last_rewards: tuple[float, ...] = ()
    max_history: int = 0


@dataclass(frozen=True)
class PolicyStatus:
    """The answer to the query ``status`` of a policy's workflow.

    ``phase`` is starting, waiting, training, paused or finished; ``reason`` says why it waits.
    """

    phase: str
    reason: str
    head: int
    live: int
    steps: int
    manifest: str
    last_rewards: tuple[float, ...]
    rollout: str


@dataclass(frozen=True)
class AwaitInput:
    """``at_least`` groups make do, 0: a whole batch; ``patience`` seconds later it says why not."""

    tenant_id: str
    policy_id: str
    at_least: int = 0
    patience: float = 60.0


@dataclass(frozen=True)
class Claimed:
    """What ``await_batch`` came back with: a manifest, or why there is none."""

    manifest_id: str = ""
    base_version: int = -1
    reason: str = ""
    head: int = -1
    live: int = -1
    step_timeout: float = 3600.0


@dataclass(frozen=True)
class StepInput:
    tenant_id: str
    policy_id: str
    manifest_id: str
    queue_prefix: str
    step_timeout: float


@dataclass(frozen=True)
class StepResult:
    """``outcome``: committed, empty_signal, dropped, failed; running while none of them."""

    manifest_id: str
    outcome: str
    version: int = -1
    reason: str = ""
    reward_mean: float | None = None


@dataclass(frozen=True)
class StepNote:
    """Names a step and says why something happens to it."""

    manifest_id: str
    reason: str = ""


@dataclass(frozen=True)
class Trained:
    """What the trainer's activity hands to the commit: ``outcome`` is trained or empty_signal.

    ``weights`` is the folder, below ``checkpoint``, that an engine loads.
    """

    manifest_id: str
    outcome: str
    checkpoint: str = ""
    weights: str = "weights"
    model_sha256: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    spans: dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class RolloutInput:
    tenant_id: str
    policy_id: str
    version: int
    queue_prefix: str


@dataclass(frozen=True)
class RolloutResult:
    """``decision`` is promoted, rejected or superseded."""

    version: int
    decision: str
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReplicaUpdate:
    tenant_id: str
    policy_id: str
    replica_id: str
    version: int


@dataclass(frozen=True)
class ProbeResult:
    """``max_difference`` of log-probs between the replica and the trainer on fixed prompts.

    ``outcome`` is proven, mismatch (the version is at fault), unreachable (the replica is) or
    superseded.
    """

    replica_id: str
    ok: bool
    max_difference: float
    seconds: float
    reason: str = ""
    outcome: str = "proven"


@dataclass(frozen=True)
class RolloutVerdict:
    """What a rollout decided about a version, and on what evidence."""

    tenant_id: str
    policy_id: str
    version: int
    reasons: list[str] = field(default_factory=list)
    probes: list[ProbeResult] = field(default_factory=list)


@dataclass(frozen=True)
class RolloutStatus:
    """A rollout's answer to the query ``status``; ``phase``: canary, rest, waiting, decided."""

    version: int
    phase: str
    probes: list[ProbeResult] = field(default_factory=list)
    attempts: int = 0


@dataclass(frozen=True)
class EpisodeInput:
    """One group of one rollout run: one task, ``size`` agents.

    ``trainable`` false is an evaluation: no admission, no group, nothing is trained on.
    """

    run_id: str
    index: int
    tenant_id: str
    policy_id: str
    task_id: str
    task: dict[str, Any]
    size: int
    queue_prefix: str
    episode_timeout: float = 600.0
    max_replacements: int = 2
    trainable: bool = True


@dataclass(frozen=True)
class GroupPlan:
    """A group that wants to start, once the policy has room for it."""

    tenant_id: str
    policy_id: str
    group_id: str
    task_id: str
    size: int


@dataclass(frozen=True)
class EpisodeWave:
    """The members of a group that are still to be played, all at once.

    The keys that they play under are never in a history. A member's number and the wave's are
    labels of its session, so that it can be found if it is lost. ``group_id`` is empty where each
    session is a group of its own.
    """

    run_id: str
    index: int
    wave: int
    members: list[int]
    group_id: str
    task_id: str
    task: dict[str, Any]
    timeout: float
    trainable: bool


@dataclass(frozen=True)
class MemberResult:
    """``ok``: the agent ended well. ``reward`` is what it reported, if it did."""

    member: int
    session_id: str
    ok: bool
    reward: float | None = None
    turns: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class LostMembers:
    """Agent runs of a wave that failed or were lost: their sessions leave the group."""

    group_id: str
    wave: int
    members: list[int]


@dataclass(frozen=True)
class GroupSize:
    """A group that goes on with fewer members than were planned."""

    group_id: str
    size: int


@dataclass(frozen=True)
class EpisodeResult:
    """``rewards`` are those that agents reported; ``replaced`` counts agent runs that were lost."""

    group_id: str
    finished: int
    failed: int
    replaced: int = 0
    rewards: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EpisodeStatus:
    """The answer to the query ``status``; ``phase`` is waiting (for room), playing or done."""

    phase: str
    finished: int
    lost: int


def episode_group_id(tenant_id: str, policy_id: str, run_id: str, index: int) -> str:
    """The same for every attempt at the same episode, so that its group is made once."""
    name = "/".join((tenant_id, policy_id, run_id, str(index)))
    return f"grp_{hashlib.sha256(name.encode()).hexdigest()[:24]}"
