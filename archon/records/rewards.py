"""Reading a reward from whatever form a person or a program sent it in.

Invariant: nothing is lost. What is not a finite number comes back with the reason why it was not
counted, and the raw text, so that it can be stored and shown.
"""

import json
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ParsedReward:
    """``value`` is None exactly when ``rejected`` says why."""

    value: float | None
    component: str = ""
    source: str = ""
    interaction_id: str | None = None
    idempotency_key: str | None = None
    rejected: str = ""
    raw: str = ""


def parse_reward(raw: object) -> ParsedReward:
    """Accept ``1.0``, ``true``, ``"0.5"``, ``{"value": 1}``, ``{"reward": 1, "source": "s"}``."""
    text = _as_text(raw)
    fields = raw if isinstance(raw, dict) else {"value": raw}
    number = fields.get("value", fields.get("reward"))
    value, rejected = _finite(number)
    return ParsedReward(
        value=value,
        component=str(fields.get("component") or ""),
        source=str(fields.get("source") or ""),
        interaction_id=_optional(fields.get("interaction_id")),
        idempotency_key=_optional(fields.get("idempotency_key")),
        rejected=rejected,
        raw=text,
    )


def _as_text(raw: object) -> str:
    try:
        return json.dumps(raw)[:4096]
    except (TypeError, ValueError):
        return repr(raw)[:4096]


def _optional(value: object) -> str | None:
    return None if value is None else str(value)


def _finite(number: object) -> tuple[float | None, str]:
    if number is None:
        return None, "no value given"
    if not isinstance(number, (int, float, str)):
        return None, f"not a number: {type(number).__name__}"
    try:
        value = float(number)
    except (ValueError, OverflowError):
        return None, f"not a number: {str(number)[:80]!r}"
    if not math.isfinite(value):
        return None, f"not finite: {value}"
    return value, ""
