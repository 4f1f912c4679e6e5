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
        body["expires_in"] = round(expires_in_hours * 3600)
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
        ended = "revoked" if key["revoked_at"] else key["expires_at"] or "valid"
        print(
            f"{key['key_id'][:_SHOWN]}  {key['scope']:6}  {key['policy'] or '-':16}  "
            f"{ended:32}  {key['label']}"
        )


def revoke(client: GatewayClient, key_id: str) -> None:
    found = [
        key["key_id"]
        for key in client.call("GET", "/rl/keys")["keys"]
        if key["key_id"].startswith(key_id)
    ]
    if len(found) != 1:
        raise StackError(
            f"{len(found)} keys have an id that begins with {key_id!r}; see `archon key list`"
        )
    client.call("DELETE", f"/rl/keys/{found[0]}")
    print(f"revoked {found[0][:_SHOWN]}")
