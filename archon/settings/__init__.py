"""Settings of an installation: a file, then the environment, then flags; each with bounds and help.

Invariant: what is accepted changes something. An unknown name is refused, and so is a value that
cannot be honoured.

``archon.toml`` is looked up in the working folder or named by ``ARCHON_CONFIG``; every field can be
set by the environment too: ``ARCHON_GATEWAY__PORT=8080``.
"""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from archon.records import PolicySettings, loads


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GatewaySettings(_Section):
    host: str = Field("127.0.0.1", description="Address to bind. A public one needs an admin key.")
    port: int = Field(8080, ge=0, le=65535, description="Port of the gateway; 0 picks a free one.")
    max_inflight: int = Field(256, ge=1, le=65536, description="Calls at once before a 429.")
    hold_seconds: float = Field(
        30.0, ge=0, le=600, description="How long a call waits for a replica before a 503."
    )


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


class Settings(BaseSettings):
    """One installation. ``policies`` names the policies and their settings."""

    model_config = SettingsConfigDict(
        env_prefix="ARCHON_", env_nested_delimiter="__", extra="forbid"
    )

    data_dir: Path = Field(Path(".archon"), description="Everything that must survive is here.")
    tenant: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="Tenant.")
    lake: str = Field("", description="Folder or s3:// for captured data; default DATA_DIR/lake.")
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
            except TypeError as error:
                raise ValueError(f"[policies.{name}]: {error}") from error
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = Path(os.environ.get("ARCHON_CONFIG", "archon.toml"))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, file)

    def policy(self, policy_id: str) -> PolicySettings:
        """The settings of one policy; KeyError where there is none of that name."""
        return loads(PolicySettings, self.policies[policy_id])

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
