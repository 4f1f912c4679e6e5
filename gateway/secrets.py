"""The secrets that a gateway reads from its installation.

Invariant: a gateway that others can reach has an operator's key, or does not start.
"""

import ipaddress
import logging
from pathlib import Path

from archon.settings import Settings
from archon.storage.keys import hash_key

log = logging.getLogger("archon.gateway")


def operator_hash(settings: Settings) -> str | None:
    """The hash of the admin key; None on a loopback bind that has none."""
    own = settings.gateway.admin_key
    secret = own.get_secret_value() if own else _read(settings.secrets_dir / "admin.key")
    if secret:
        return hash_key(secret)
    where = settings.secrets_dir / "admin.key"
    if is_public(settings.gateway.host):
        raise ValueError(
            f"gateway.host = {settings.gateway.host} can be reached by others, and there is no "
            f"admin key: put one into {where}, or set gateway.admin_key"
        )
    log.warning("no admin key in %s: only keys of the database are known", where)
    return None


def engine_token(settings: Settings) -> str | None:
    return _read(settings.secrets_dir / "engine.token") or None


def is_public(host: str) -> bool:
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
