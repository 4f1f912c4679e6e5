"""Fields of a JSON body, read with their names in the errors."""

from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.errors import ApiError


def wrong(name: str, message: str) -> ApiError:
    return ApiError(422, f"{name}: {message}", param=name, code="bad_field")


def optional_text(fields: dict[str, Any], name: str) -> str | None:
    """None for what is missing, null or empty."""
    return text(fields, name) or None


def text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or "\0" in value:
        raise wrong(name, "must be text")
    return value


def whole(fields: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, f"must be a whole number from {low} to {high}")
    return value


def flag(fields: dict[str, Any], name: str, otherwise: bool) -> bool:
    value = fields.get(name, otherwise)
    if not isinstance(value, bool):
        raise wrong(name, "must be true or false")
    return value


def mapping(fields: dict[str, Any], name: str) -> dict[str, str]:
    """Names to texts."""
    value = fields.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise wrong(name, "must be an object of texts")
    return {text({"": key}, ""): text(value, key) for key in value}


def when(fields: dict[str, Any], name: str) -> datetime | None:
    """A time: ISO 8601, or seconds since 1970."""
    value = fields.get(name)
    if value is None:
        return None
    try:
        if isinstance(value, str):
            at = datetime.fromisoformat(value)
            return at if at.tzinfo else at.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=value)
    except (ValueError, OverflowError):
        pass
    raise wrong(name, "must be a time, as ISO 8601 or in seconds since 1970")
