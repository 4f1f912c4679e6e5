"""``archon key``: the gateway's ``/rl/keys``."""

import json
from typing import Any

from archon.cli.sessions import GatewayClient
from archon.stack.errors import StackError

_SHOWN = 12


def create(
    client: GatewayClient,
    policy: str | None,
    label: str,
    expires_in_hours: float | None,
    as_json: bool,
) -> None:
    body: dict[str, Any] = {"label": label}
    if policy is not None:
        body["policy"] = policy
    if expires_in_hours is not None:
        body["expires_in"] = expires_in_hours * 3600
    answer = client.call("POST", "/rl/keys", body)
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    print(f"api_key   {answer['api_key']}")
    print(f"base_url  {client.base}/v1")
    print("It is shown this once; only its hash is kept.")


def list_keys(client: GatewayClient, as_json: bool) -> None:
    answer = client.call("GET", "/rl/keys")
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    for key in answer["keys"]:
        ended = "revoked" if key.get("revoked_at") else key.get("expires_at") or "valid"
        print(
            f"{key['key_hash'][:_SHOWN]}  {key['scope']:7}  {key.get('policy_id') or '-':16}  "
            f"{ended:26}  {key.get('label', '')}"
        )


def revoke(client: GatewayClient, key_hash: str) -> None:
    if len(key_hash) < 8:
        raise StackError(f"{key_hash!r} is too short to name a key: give 8 digits or more")
    client.call("DELETE", f"/rl/keys/{key_hash}")
    print(f"revoked {key_hash[:_SHOWN]}")
