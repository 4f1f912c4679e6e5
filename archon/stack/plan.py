"""From settings to processes: which run, on which ports, with what in their environment.

Invariant: whatever can be refused is refused here, before anything is started.
"""

import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.settings import Settings, config_file
from archon.stack import temporal
from archon.stack.errors import StackError
from archon.stack.files import make_folder, secret, write_file
from archon.stack.process import Spec, python
from archon.stack.state import Ports, ended_unclean


@dataclass(frozen=True)
class ReplicaPlan:
    """One engine: ``port`` is 0 where it is not ours to start."""

    replica_id: str
    policy_id: str
    url: str
    kind: str
    port: int = 0


@dataclass(frozen=True)
class Plan:
    """Everything about a stack that is known before it runs."""

    settings: Settings
    flags: dict[str, Any]
    data_dir: Path
    run_dir: Path
    logs_dir: Path
    gateway_port: int
    temporal_port: int
    temporal_ui_port: int
    replicas: tuple[ReplicaPlan, ...]

    @property
    def own_temporal(self) -> bool:
        return self.settings.temporal.address is None

    @property
    def own_postgres(self) -> bool:
        return self.settings.postgres.url is None

    @property
    def gateway_url(self) -> str:
        host = self.settings.gateway.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.gateway_port}"

    @property
    def temporal_address(self) -> str:
        return self.settings.temporal.address or f"127.0.0.1:{self.temporal_port}"

    @property
    def temporal_ui(self) -> str:
        return f"http://127.0.0.1:{self.temporal_ui_port}" if self.own_temporal else ""

    def environment(self, postgres_url: str) -> dict[str, str]:
        """What every process of the stack gets: the flags, and where everything is."""
        named = config_file().absolute()
        return {
            **flags_as_environment(self.flags),
            **({"ARCHON_CONFIG": str(named)} if named.is_file() else {}),
            "ARCHON_DATA_DIR": str(self.data_dir),
            "ARCHON_POSTGRES__URL": postgres_url,
            "ARCHON_TEMPORAL__ADDRESS": self.temporal_address,
            "ARCHON_GATEWAY__HOST": self.settings.gateway.host,
            "ARCHON_GATEWAY__PORT": str(self.gateway_port),
        }

    def temporal_spec(self) -> Spec:
        folder = self.data_dir / "temporal"
        make_folder(folder, 0o700)
        return temporal.spec(
            port=self.temporal_port,
            ui_port=self.temporal_ui_port,
            database=folder / "temporal.sqlite",
        )

    def replica_spec(self, replica: ReplicaPlan) -> Spec:
        engine = self.settings.engine
        policy = self.settings.policy(replica.policy_id)
        command = python(
            "engine.serving", "--host", "127.0.0.1", "--port", str(replica.port),
            "--control-token-file", str(self.settings.secrets_dir / "engine.token"),
            "--max-batch", str(engine.max_batch), "--dtype", engine.dtype,
            "--threads", str(engine.threads), "--max-model-len", str(policy.max_model_len),
        )  # fmt: skip
        return Spec(replica.replica_id, command, _threads(engine.threads))


def check(settings: Settings) -> None:
    """StackError where the stack could not run as it is set."""
    _refuse_open_gateway(settings)
    _check_policies(settings)
    url = settings.postgres.url
    if url and not url.get_secret_value().startswith(("postgresql://", "postgres://")):
        raise StackError("postgres.url must begin with postgresql://")


def make_folders(settings: Settings) -> None:
    data_dir = settings.data_dir.absolute()
    for folder in (data_dir, settings.run_dir, data_dir / "logs"):
        make_folder(folder, 0o755)


def make_plan(settings: Settings, flags: dict[str, Any]) -> Plan:
    """Choose the ports; StackError where one is taken. The caller holds the folder's lock."""
    data_dir = settings.data_dir.absolute()
    own = settings.temporal.address is None
    patience = 6.0 if ended_unclean(settings.run_dir) else 0.0
    ports, loopback = Ports(settings.run_dir, patience), "127.0.0.1"
    fixed = ports.fixed
    gateway = settings.gateway
    return Plan(
        settings=settings,
        flags=flags,
        data_dir=data_dir,
        run_dir=settings.run_dir,
        logs_dir=data_dir / "logs",
        gateway_port=fixed("gateway", gateway.host, gateway.port, "gateway.port"),
        temporal_port=fixed("temporal", loopback, settings.temporal.port, "temporal.port")
        if own
        else 0,
        temporal_ui_port=fixed(
            "temporal-ui", loopback, settings.temporal.ui_port, "temporal.ui_port"
        )
        if own
        else 0,
        replicas=tuple(_replicas(settings, ports)),
    )


def _replicas(settings: Settings, ports: Ports) -> list[ReplicaPlan]:
    plans = []
    for name in settings.policies:
        for index, url in enumerate(settings.engine.urls):
            plans.append(ReplicaPlan(f"rep_own_{name}_{index}", name, url.rstrip("/"), "external"))
        for index in range(0 if settings.engine.urls else settings.engine.replicas):
            replica_id = f"rep_embedded_{name}_{index}"
            port = ports.any(replica_id)
            url = f"http://127.0.0.1:{port}"
            plans.append(ReplicaPlan(replica_id, name, url, "embedded", port))
    return plans


def _check_policies(settings: Settings) -> None:
    """StackError where a policy's model folder could not be served."""
    for name in settings.policies:
        model = Path(settings.policy(name).model)
        if not (model / "config.json").is_file():
            raise StackError(
                f"policy {name}: {model} is not the folder of a Hugging Face model (it has no "
                f"config.json). Set policies.{name}.model."
            )
    if settings.engine.urls and len(settings.policies) > 1:
        raise StackError(
            "engine.urls names engines of your own, and an engine serves one policy: "
            f"with {len(settings.policies)} policies leave it unset."
        )


def make_secrets(settings: Settings) -> None:
    """``admin.key`` and ``engine.token`` in the secrets folder, 0600."""
    folder = settings.secrets_dir
    make_folder(folder, 0o700)
    secret(folder / "engine.token")
    own, file = settings.gateway.admin_key, folder / "admin.key"
    if own is None:
        secret(file, "sk-admin-")
    elif not file.exists() or file.read_text().strip() != own.get_secret_value():
        write_file(file, own.get_secret_value() + "\n", 0o600)


def _refuse_open_gateway(settings: Settings) -> None:
    host = settings.gateway.host
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and settings.gateway.admin_key is None:
        raise StackError(
            f"gateway.host = {host} can be reached from other machines, and there is no admin key "
            "of your own. Set gateway.admin_key (or ARCHON_GATEWAY__ADMIN_KEY) to a secret that "
            "begins with sk-admin-, or bind 127.0.0.1."
        )


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


def flags_as_environment(flags: dict[str, Any], prefix: str = "ARCHON_") -> dict[str, str]:
    """Nested settings as the environment variables that say the same."""
    out: dict[str, str] = {}
    for name, value in flags.items():
        variable = prefix + name.upper()
        if isinstance(value, dict):
            out |= flags_as_environment(value, f"{variable}__")
        elif isinstance(value, str | os.PathLike):
            out[variable] = str(value)
        else:
            out[variable] = json.dumps(value)
    return out
