"""The records of Archon: frozen, typed, in one place. Standard library only."""

from archon.records.ids import (
    GROUP,
    INTERACTION,
    MANIFEST,
    OUTBOX,
    REPLICA,
    REWARD,
    SAMPLE,
    SESSION,
    Clock,
    IdSource,
    random_id,
    system_clock,
)
from archon.records.policy import AlgorithmSettings, PolicySettings
from archon.records.rewards import ParsedReward, parse_reward
from archon.records.serving import Outbox, Policy, Replica, RolloutDecision, Tenant
from archon.records.sessions import (
    CloseReason,
    Group,
    GroupState,
    Interaction,
    InteractionStatus,
    Key,
    KeyScope,
    Reward,
    Session,
    SessionState,
    Support,
    VersionRange,
)
from archon.records.training import (
    BatchManifest,
    ManifestState,
    PolicyVersion,
    Return,
    ReturnRef,
    Sample,
    SampleRef,
    SampleState,
    VersionState,
)
from archon.records.wire import dumps, loads

__all__ = [
    "GROUP", "INTERACTION", "MANIFEST", "OUTBOX", "REPLICA", "REWARD", "SAMPLE", "SESSION",
    "AlgorithmSettings", "BatchManifest", "Clock", "CloseReason", "Group", "GroupState",
    "IdSource", "Interaction", "InteractionStatus", "Key", "KeyScope", "ManifestState", "Outbox",
    "ParsedReward", "Policy", "PolicySettings", "PolicyVersion", "Replica", "Return", "ReturnRef",
    "Reward", "RolloutDecision", "Sample", "SampleRef", "SampleState", "Session", "SessionState",
    "Support", "Tenant", "VersionRange", "VersionState", "dumps", "loads", "parse_reward",
    "random_id", "system_clock",
]  # fmt: skip
