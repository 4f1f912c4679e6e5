"""Advantages of interactions within their groups: GRPO and RLOO.

A group is known by its id, never by position, and every session counts once in its group's
baseline, however many interactions it has: a session's value is the mean of its returns. A group
of one session has nobody to compare with and takes the running baseline, without which its
advantage is 0. All arithmetic is float64 and nothing here can become NaN.

GRPO: Shao et al., DeepSeekMath, 2024 (arXiv 2402.03300). RLOO: Ahmadian et al., 2024 (arXiv
2402.14740).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

ZERO = 1e-9
STD_FLOOR = 1e-6


@dataclass(frozen=True)
class Scored:
    """An interaction with its return."""

    group_id: str
    session_id: str
    value: float


def grpo(
    scored: Sequence[Scored], baseline: float | None, *, normalize_std: bool = True, ddof: int = 0
) -> list[float]:
    """Return less the group's mean, over the group's standard deviation where that is not 0."""
    groups = _groups(scored)
    advantages = []
    for item in scored:
        others = groups[item.group_id]
        if len(others) == 1:
            advantages.append(_alone(item.value, baseline))
            continue
        centred = item.value - fmean(others.values())
        std = _std(list(others.values()), ddof) if normalize_std else 0.0
        # Sessions that agree may hold interactions that differ: dividing by 0 would blow those up.
        advantages.append(_flush(centred / (std + STD_FLOOR) if std > STD_FLOOR else centred))
    return advantages


def rloo(scored: Sequence[Scored], baseline: float | None) -> list[float]:
    """Return less the mean of the group's other sessions."""
    groups = _groups(scored)
    advantages = []
    for item in scored:
        sessions = groups[item.group_id]
        others = [value for session, value in sessions.items() if session != item.session_id]
        if others:
            advantages.append(_flush(item.value - fmean(others)))
        else:
            advantages.append(_alone(item.value, baseline))
    return advantages


def all_zero(advantages: Sequence[float]) -> bool:
    """True where a step would learn nothing: every return equals its baseline."""
    return all(advantage == 0.0 for advantage in advantages)


def _groups(scored: Sequence[Scored]) -> dict[str, dict[str, float]]:
    """group → session → the session's value."""
    returns: dict[str, dict[str, list[float]]] = {}
    owner: dict[str, str] = {}
    for item in scored:
        if not math.isfinite(item.value):
            raise ValueError(f"session {item.session_id}: return {item.value} is not finite")
        if owner.setdefault(item.session_id, item.group_id) != item.group_id:
            raise ValueError(
                f"session {item.session_id} is in two groups: "
                f"{owner[item.session_id]} and {item.group_id}"
            )
        returns.setdefault(item.group_id, {}).setdefault(item.session_id, []).append(item.value)
    return {
        group: {session: fmean(values) for session, values in sessions.items()}
        for group, sessions in returns.items()
    }


def _std(values: list[float], ddof: int) -> float:
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def _alone(value: float, baseline: float | None) -> float:
    return 0.0 if baseline is None else _flush(value - baseline)


def _flush(advantage: float) -> float:
    """Equal returns must give exactly 0, whatever the mean's last bit."""
    return 0.0 if abs(advantage) < ZERO else advantage
