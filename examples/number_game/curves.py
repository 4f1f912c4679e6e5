"""What a run of the demo did, read from its database: the same rows that trained the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

import psycopg

_EPISODES = """
SELECT v.version, s.min_version, r.value
FROM policy_version v
JOIN sample s ON s.manifest_id = v.manifest_id AND s.state = 'trained'
JOIN LATERAL (
    SELECT value FROM reward WHERE session_id = s.session_id AND interaction_id IS NULL
      AND value IS NOT NULL ORDER BY seq DESC LIMIT 1
) r ON true
ORDER BY v.version, s.group_id, s.sample_id
"""
_VERSIONS = """
SELECT version, created_at, live_at, metrics FROM policy_version WHERE version > 0 ORDER BY version
"""


@dataclass
class Curves:
    """``rewards`` of the trained episodes, in the order in which they were trained."""

    rewards: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    steps: int = 0
    live: int = 0
    started: datetime | None = None
    ended: datetime | None = None
    dropped: dict[str, int] = field(default_factory=dict)

    def mean(self, part: slice) -> float:
        chosen = self.rewards[part]
        return sum(chosen) / len(chosen) if chosen else float("nan")

    def by_version(self) -> dict[int, float]:
        """Mean reward of the episodes that each version was trained on."""
        sums: dict[int, list[float]] = {}
        for version, reward in zip(self.versions, self.rewards, strict=True):
            sums.setdefault(version, []).append(reward)
        return {version: sum(values) / len(values) for version, values in sums.items()}


def read(url: str) -> Curves:
    """All of it, as it stands now."""
    curves = Curves()
    with psycopg.connect(url) as connection:
        for version, sampled_by, reward in connection.execute(_EPISODES):
            curves.versions.append(version)
            curves.staleness.append(version - 1 - sampled_by)
            curves.rewards.append(reward)
        for version, created_at, live_at, _ in connection.execute(_VERSIONS):
            curves.steps += 1
            curves.started = curves.started or created_at
            curves.ended = created_at
            curves.live = version if live_at else curves.live
        for reason, count in connection.execute(
            "SELECT drop_reason, count(*) FROM sample WHERE state = 'dropped' GROUP BY 1"
        ):
            curves.dropped[reason] = count
    return curves


def steps(url: str) -> tuple[int, int]:
    """(committed steps, live version): cheap enough to ask for once a second."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FILTER (WHERE version > 0), "
            "coalesce(max(version) FILTER (WHERE state = 'live'), 0) FROM policy_version"
        ).fetchone()
    assert row is not None, "an aggregate always has a row"
    return row[0], row[1]
