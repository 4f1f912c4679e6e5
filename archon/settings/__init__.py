"""Settings of an installation: a file, then the environment, then flags; each with bounds and help.

Invariant: what is accepted changes something. An unknown name is refused, and so is a value that
cannot be honoured.

``archon.toml`` is looked up in the working folder or named by ``ARCHON_CONFIG``; every field can be
set by the environment too: ``ARCHON_GATEWAY__PORT=8080``.
"""

import dataclasses
import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from archon.records import PolicySettings, loads

_ADMIN_KEY_LENGTH = 32


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GatewaySettings(_Section):
    host: str = Field("127.0.0.1", description="Address to bind. A public one needs an admin key.")
    port: int = Field(8080, ge=0, le=65535, description="Port of the gateway; 0 picks a free one.")
    max_inflight: int = Field(256, ge=1, le=65536, description="Calls at once before a 429.")
    hold_seconds: float = Field(
        30.0, ge=0, le=600, description="How long a call waits for a replica before a 503."
    )
    admin_key: SecretStr | None = Field(
        None, description="sk-admin-… of your own; unset: one is made, in DATA_DIR/secrets."
    )

    @field_validator("admin_key")
    @classmethod
    def _strong(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            secret = value.get_secret_value()
            if not secret.startswith("sk-admin-") or len(secret) < _ADMIN_KEY_LENGTH:
                raise ValueError(
                    f"must begin with sk-admin- and have {_ADMIN_KEY_LENGTH} characters or more"
                )
        return value


class PostgresSettings(_Section):
    url: SecretStr | None = Field(
        None, description="postgresql://… of your own server; unset: Archon runs one for you."
    )
    pool_size: int = Field(8, ge=1, le=256, description="Connections a process keeps.")


class TemporalSettings(_Section):
    address: str | None = Field(
        None, description="host:port of your own server; unset: Archon runs a dev server."
    )
    namespace: str = Field("default", description="Temporal namespace.")
    port: int = Field(7233, ge=0, le=65535, description="Port of the dev server; 0 picks one.")
    ui_port: int = Field(8233, ge=0, le=65535, description="Port of its web UI; 0 picks one.")
    queue_prefix: str = Field("archon", min_length=1, description="Prefix of the task queues.")


class EngineSettings(_Section):
    replicas: int = Field(2, ge=1, le=64, description="Embedded engine replicas per policy.")
    urls: list[str] = Field(
        default_factory=list, description="Engines of your own instead of embedded replicas."
    )
    dtype: str = Field("float32", pattern="^(float32|bfloat16)$", description="Serving dtype.")
    threads: int = Field(1, ge=1, le=256, description="Compute threads of a replica.")
    trainer_threads: int = Field(1, ge=1, le=256, description="Compute threads of the trainer.")
    max_batch: int = Field(64, ge=1, le=4096, description="Requests decoded at once.")


def config_file() -> Path:
    """The settings file; one that was named must exist."""
    named = os.environ.get("ARCHON_CONFIG")
    if named and not Path(named).is_file():
        raise ValueError(f"ARCHON_CONFIG = {named}: there is no such file")
    return Path(named or "archon.toml")


def refuse_stray_names(names: Iterable[str]) -> None:
    """ValueError for an ``ARCHON_…`` name that was meant as a setting and is none.

    Without this a single underscore (``ARCHON_GATEWAY_PORT``) would be ignored silently.
    """
    fields = list(Settings.model_fields)
    for name in names:
        if not name.upper().startswith("ARCHON_"):
            continue
        rest = name.lower().removeprefix("archon_")
        head, nested, _ = rest.partition("__")
        if head in fields:
            continue
        section = next((f for f in fields if head.startswith(f"{f}_")), None)
        near = difflib.get_close_matches(head, fields, n=1, cutoff=0.8)
        if section is not None:
            hint = f"ARCHON_{section}__{rest.removeprefix(section).lstrip('_')}?".upper()
        elif near:
            hint = f"ARCHON_{near[0]}{rest.removeprefix(head)}?".upper()
        elif nested:
            hint = f"known after ARCHON_ are {', '.join(fields).upper()}"
        else:
            continue
        raise ValueError(f"{name}: no such setting; {hint}")


class Settings(BaseSettings):
    """One installation. ``policies`` names the policies and their settings."""

    model_config = SettingsConfigDict(
        env_prefix="ARCHON_", env_nested_delimiter="__", extra="forbid"
    )

    data_dir: Path = Field(Path(".archon"), description="Everything that must survive is here.")
    tenant: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="Tenant.")
    lake: str = Field("", description="Folder or s3:// for captured data; default DATA_DIR/lake.")
    lake_interval: float = Field(
        30.0, ge=1, le=86400, description="Seconds between two files of captured data."
    )
    checkpoints: str = Field("", description="Folder of checkpoints; default DATA_DIR/checkpoints.")
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    postgres: PostgresSettings = Field(default_factory=PostgresSettings)
    temporal: TemporalSettings = Field(default_factory=TemporalSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    policies: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="[policies.NAME]: model, batch_groups, algorithm, …"
    )

    @field_validator("policies")
    @classmethod
    def _valid_policies(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, fields in value.items():
            try:
                loads(PolicySettings, fields)
            except (TypeError, ValueError) as error:
                raise ValueError(f"[policies.{name}]: {error}") from error
        return value

    @model_validator(mode="after")
    def _no_stray_environment(self) -> "Settings":
        refuse_stray_names(os.environ)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        source = TomlConfigSettingsSource(settings_cls, config_file())
        return init_settings, env_settings, source

    def policy(self, policy_id: str) -> PolicySettings:
        """The settings of one policy, its model's folder seen from where ``archon.toml`` is.

        KeyError where there is none of that name.
        """
        policy = loads(PolicySettings, self.policies[policy_id])
        model = (config_file().absolute().parent / Path(policy.model).expanduser()).resolve()
        return dataclasses.replace(policy, model=str(model))

    @property
    def lake_url(self) -> str:
        return self.lake or str(self.data_dir.absolute() / "lake")

    @property
    def checkpoints_dir(self) -> Path:
        return Path(self.checkpoints or self.data_dir.absolute() / "checkpoints")

    @property
    def secrets_dir(self) -> Path:
        return self.data_dir.absolute() / "secrets"

    @property
    def run_dir(self) -> Path:
        return self.data_dir.absolute() / "run"
