"""Who is served, by what, and what still has to be told to Temporal.

Invariant: an outbox entry is written in the transaction of the thing that it announces.
"""

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class Tenant:
    tenant_id: str
    created_at: datetime


@dataclass(frozen=True)
class Policy:
    """``settings``: a :class:`PolicySettings` as JSON; ``baseline``: the running mean return."""

    tenant_id: str
    policy_id: str
    settings: dict[str, object]
    created_at: datetime
    baseline: float | None = None
    baseline_weight: float = 0.0


@dataclass(frozen=True)
class Replica:
    """One engine process that serves one policy. ``version`` is what it was last proven to serve.

    ``instance`` is the process that was proven: a restart has another and must be given its
    weights, and proven, again.
    """

    replica_id: str
    tenant_id: str
    policy_id: str
    url: str
    kind: str
    created_at: datetime
    version: int | None = None
    instance: str = ""
    seen_at: datetime | None = None


@dataclass(frozen=True)
class Outbox:
    """``kind`` is session, reward or close; ``ref`` the id of the row that it announces."""

    outbox_id: int
    tenant_id: str
    policy_id: str
    session_id: str
    kind: str
    ref: str
    created_at: datetime
    sent_at: datetime | None = None


@dataclass(frozen=True)
class RolloutDecision:
    """Why a version was promoted or rejected; kept for ever."""

    tenant_id: str
    policy_id: str
    version: int
    decision: str
    reasons: list[str]
    created_at: datetime
    probes: list[dict[str, object]] = field(default_factory=list)
