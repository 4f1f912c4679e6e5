"""Settings: file < environment < flags; what is unknown or out of bounds is refused by name."""

import tomllib
from pathlib import Path

import pytest

from archon.cli.init import SETTINGS_FILE, write_settings_file
from archon.cli.settings import explain, flags, load
from archon.settings import Settings
from archon.stack.errors import StackError
from archon.stack.plan import check, flags_as_environment


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARCHON_CONFIG", raising=False)
    return tmp_path


def refusal(**given: object) -> str:
    with pytest.raises(ValueError) as caught:
        Settings(**given)  # type: ignore[arg-type]
    return explain(caught.value)


def test_environment_beats_file_and_flags_beat_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "archon.toml").write_text("[gateway]\nport = 1001\nmax_inflight = 7\n")
    assert Settings().gateway.port == 1001
    monkeypatch.setenv("ARCHON_GATEWAY__PORT", "1002")
    assert Settings().gateway.port == 1002
    found = load(None, flags({"gateway.port": 1003, "gateway.host": None}, ["engine.threads=2"]))
    assert (found.gateway.port, found.gateway.max_inflight, found.engine.threads) == (1003, 7, 2)


def test_unknown_names_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(gateway={"prt": 1}) == "gateway.prt: no such setting"
    (folder / "archon.toml").write_text("[gateway]\nprt = 1\n[gatway]\nport = 2\n")
    assert refusal() == "gateway.prt: no such setting\n  gatway: no such setting"
    (folder / "archon.toml").write_text('[policies.game]\nmodel = "m"\nbatch_group = 1\n')
    assert refusal() == "policies: [policies.game]: PolicySettings: unknown field batch_group"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ARCHON_GATEWAY_PORT", "ARCHON_GATEWAY__PORT?"),
        ("ARCHON_GATEWAI__PORT", "ARCHON_GATEWAY__PORT?"),
        ("ARCHON_DATADIR", "ARCHON_DATA_DIR?"),
        ("ARCHON_NOTHING__LIKE", "known after ARCHON_ are DATA_DIR"),
    ],
)
def test_a_mistyped_variable_is_refused(
    name: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert name in refusal()
    assert hint in refusal()


def test_variables_of_other_purposes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ARCHON_FAILPOINTS", "ARCHON_TASK", "ARCHON_EPISODE"):
        monkeypatch.setenv(name, "x")
    assert Settings().gateway.port == 8080


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gateway": {"port": 65536}}, "gateway.port: Input should be less than or equal to 65535"),
        ({"engine": {"replicas": 0}}, "engine.replicas: Input should be greater than or equal"),
        ({"engine": {"dtype": "int8"}}, "engine.dtype"),
        ({"tenant": "../x"}, "tenant"),
        ({"policies": {"p": {"model": "m", "gamma": 2}}}, "[policies.p]: gamma = 2.0: must be"),
        ({"gateway": {"admin_key": "sk-admin-short"}}, "32 characters or more"),
    ],
)  # fmt: skip
def test_bounds(given: dict[str, object], words: str) -> None:
    assert words in refusal(**given)


def test_every_field_has_a_help_text() -> None:
    for field in Settings.model_fields.values():
        section = field.annotation
        assert field.description or all(
            inner.description
            for inner in section.model_fields.values()  # type: ignore[union-attr]
        )


def test_a_settings_file_that_was_named_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCHON_CONFIG", "/nowhere/archon.toml")
    assert refusal() == "ARCHON_CONFIG = /nowhere/archon.toml: there is no such file"


def test_a_model_is_looked_up_beside_the_settings_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "etc").mkdir()
    (folder / "etc" / "archon.toml").write_text('[policies.game]\nmodel = "models/tiny"\n')
    monkeypatch.setenv("ARCHON_CONFIG", "etc/archon.toml")
    assert Settings().policy("game").model == str(folder.resolve() / "etc" / "models" / "tiny")


def test_the_file_of_init_is_short_and_is_understood(folder: Path) -> None:
    file = folder / "archon.toml"
    write_settings_file(file, force=False)
    assert len(file.read_text().splitlines()) < 40
    assert Settings().policy("default").model == str(folder.resolve() / "model")
    with pytest.raises(StackError, match="is there already"):
        write_settings_file(file, force=False)


def test_every_commented_line_of_init_is_a_setting(folder: Path) -> None:
    lines = [line.removeprefix("# ") for line in SETTINGS_FILE.splitlines()[3:]]
    text = "\n".join(lines).replace("sk-admin-…", "sk-admin-" + "x" * 32)
    (folder / "archon.toml").write_text(text)
    found = Settings()
    assert found.lake_url == "s3://bucket/archon"
    assert set(tomllib.loads(text)) == {
        "data_dir", "lake", "gateway", "postgres", "temporal", "engine", "policies",
    }  # fmt: skip


def test_flags_reach_the_children_as_environment() -> None:
    given = flags(
        {"gateway.port": 0, "data_dir": Path("x")},
        ["policies.game.model=m", 'engine.urls=["http://a"]'],
    )
    assert flags_as_environment(given) == {
        "ARCHON_GATEWAY__PORT": "0",
        "ARCHON_DATA_DIR": "x",
        "ARCHON_POLICIES__GAME__MODEL": "m",
        "ARCHON_ENGINE__URLS": '["http://a"]',
    }
    with pytest.raises(StackError, match="write NAME=VALUE"):
        flags({}, ["engine.threads"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu-box"])
def test_a_public_gateway_needs_an_admin_key_of_ones_own(host: str) -> None:
    with pytest.raises(StackError, match="no admin key of your own"):
        check(Settings(gateway={"host": host}))
    check(Settings(gateway={"host": host, "admin_key": "sk-admin-" + "k" * 32}))


def test_loopback_needs_none() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check(Settings(gateway={"host": host}))


def test_a_policy_without_a_model_folder_is_refused(folder: Path) -> None:
    with pytest.raises(StackError, match="policy game: .* has no config.json"):
        check(Settings(policies={"game": {"model": str(folder)}}))
