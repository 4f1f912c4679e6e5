"""``archon session`` and ``archon reward``: the gateway's ``/rl`` routes."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import httpx

from archon.cli.settings import flags, load
from archon.stack.errors import StackError
from archon.stack.state import holder, read_state

_TIMEOUT_S = 30.0


class GatewayClient:
    """Calls that come back as JSON, or raise StackError with what the gateway said."""

    def __init__(self, base: str, key: str) -> None:
        self.base = base.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self.base, headers={"authorization": f"Bearer {key}"}, timeout=_TIMEOUT_S
        )

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise StackError(
                f"the gateway at {self.base} does not answer ({type(error).__name__}). "
                "Is it running? See `archon status`."
            ) from error
        if answer.is_error:
            raise StackError(f"{method} {path}: {answer.status_code}: {_message(answer)}")
        return answer.json() if answer.content else {}


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:500]
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def connect(
    gateway: str | None, key: str | None, data_dir: Path | None, config: Path | None
) -> GatewayClient:
    """A client of the gateway that was named, else of the installation here."""
    if gateway is not None and key is not None:
        return GatewayClient(gateway, key)
    settings = load(config, flags({"data_dir": data_dir}))
    if gateway is None:
        if holder(settings.run_dir) is None:
            raise StackError(
                f"Archon is not running on {settings.data_dir.absolute()}. Start it with "
                "`archon up`, or name a gateway with --gateway and --key."
            )
        gateway = str(read_state(settings.run_dir)["gateway"])
    if key is None:
        file = settings.secrets_dir / "admin.key"
        try:
            key = file.read_text().strip()
        except OSError as error:
            raise StackError(
                f"cannot read the admin key: {file}: {error.strerror}. Give --key."
            ) from error
    return GatewayClient(gateway, key)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def start(
    client: GatewayClient,
    task: str | None,
    group: str | None,
    group_size: int | None,
    policy: str | None,
    refresh: str | None,
    labels: list[str],
    as_json: bool,
) -> None:
    pairs = dict(pair.partition("=")[::2] for pair in labels)
    body = _given(
        {
            "task_id": task,
            "group_id": group,
            "group_size": group_size,
            "policy": policy,
            "api_key": refresh,
            "labels": pairs or None,
        }
    )
    answer = client.call("POST", "/rl/start_session", body)
    if as_json or not isinstance(answer.get("session_id"), str):
        json.dump(answer, sys.stdout, indent=1)
        print()
        return
    print(f"session   {answer['session_id']}")
    print(f"base_url  {client.base}/v1")
    print(f"api_key   {answer['api_key']}")


def reward(
    client: GatewayClient,
    value: str,
    session: str | None,
    interaction: str | None,
    component: str | None,
    source: str | None,
    idempotency_key: str | None,
) -> None:
    try:
        number = float(value)
    except ValueError:
        raise StackError(f"the reward {value!r} is not a number") from None
    if not math.isfinite(number):
        raise StackError(f"the reward {value} is not finite")
    body = _given(
        {
            "reward": number,
            "session_id": session,
            "interaction_id": interaction,
            "component": component,
            "source": source,
            "idempotency_key": idempotency_key,
        }
    )
    client.call("POST", "/rl/set_reward", body)
    print(f"reward {number:g} recorded" + (f" for {session}" if session else ""))


def end(client: GatewayClient, session: str | None) -> None:
    client.call("POST", "/rl/end_session", _given({"session_id": session}))
    print("session ended" + (f": {session}" if session else ""))
