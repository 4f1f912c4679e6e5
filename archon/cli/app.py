"""The commands and their options; what they do is in the modules beside this one."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

# Some releases of typer carry a copy of click's exceptions, others use click's own.
_CommandError = cast(
    type[typer.BadParameter],
    next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"),
)
_OPTIONS: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}
app = typer.Typer(
    name="archon",
    help="Durable reinforcement learning for agents in ordinary use.",
    add_completion=False,
    pretty_exceptions_enable=False,
    **_OPTIONS,
)
session_app = typer.Typer(help="Start, score and end sessions.", **_OPTIONS)
key_app = typer.Typer(help="Make, list and revoke API keys.", **_OPTIONS)
app.add_typer(session_app, name="session")
app.add_typer(key_app, name="key")

_NEGATIVE_NUMBERS = {"ignore_unknown_options": True}

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of the installation (.archon).")
]
Config = Annotated[Path | None, typer.Option("--config", help="Settings file (archon.toml).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Gateway = Annotated[
    str | None, typer.Option(help="Address of the gateway; default: of this installation.")
]
Key = Annotated[str | None, typer.Option(help="API key; default: this installation's admin key.")]
SessionId = Annotated[
    str | None, typer.Option("--session", help="Session id; not needed with a session's key.")
]
Value = Annotated[str, typer.Argument(help="The reward, a finite number.")]
Interaction = Annotated[
    str | None, typer.Option(help="Score one call of the session instead of all of it.")
]
Component = Annotated[str | None, typer.Option(help="Name of a part of the reward.")]
Source = Annotated[str | None, typer.Option(help="Who says so.")]
IdempotencyKey = Annotated[
    str | None, typer.Option(help="The same key delivers the same reward once.")
]


def run(arguments: list[str]) -> int:
    """The exit code of one command."""
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="archon", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except _CommandError as error:
        error.show()
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except ValueError as error:
        from archon.cli.settings import explain

        typer.echo(f"error: {explain(error)}", err=True)
        return 1
    except BrokenPipeError:
        return 1


@app.command()
def version() -> None:
    """Print the version."""
    import archon

    typer.echo(archon.__version__)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("archon.toml"),
    force: Annotated[bool, typer.Option(help="Write over a file that is there.")] = False,
) -> None:
    """Write a commented settings file."""
    from archon.cli.init import write_settings_file

    write_settings_file(file, force)
    typer.echo(f"wrote {file}; name your model in it, then run `archon up`")


@app.command()
def up(
    data_dir: DataDir = None,
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address the gateway binds.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0: a free one.")] = None,
    temporal_port: Annotated[int | None, typer.Option(help="Port of Temporal.")] = None,
    ui_port: Annotated[int | None, typer.Option(help="Port of Temporal's web UI.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engine replicas per policy.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting: engine.threads=2."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready.")] = False,
) -> None:
    """Start everything, keep it alive, and print the addresses."""
    from archon.cli import settings, stack

    flags = settings.flags(
        {
            "data_dir": data_dir,
            "gateway.host": host,
            "gateway.port": port,
            "temporal.port": temporal_port,
            "temporal.ui_port": ui_port,
            "engine.replicas": replicas,
        },
        set_ or [],
    )
    stack.up(settings.load(config, flags), flags, detach)


@app.command()
def down(
    data_dir: DataDir = None,
    config: Config = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 60.0,
) -> None:
    """End a running stack in order."""
    from archon.cli import settings, stack

    stack.down(settings.load(config, settings.flags({"data_dir": data_dir})), timeout)


@app.command()
def status(data_dir: DataDir = None, config: Config = None, as_json: AsJson = False) -> None:
    """Say what runs; exit code 1 where something does not."""
    from archon.cli import settings, status

    found = settings.load(config, settings.flags({"data_dir": data_dir}))
    raise typer.Exit(status.show(found, as_json))


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(help="One process: gateway, worker, …")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many.")] = 50,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Print the logs of the processes."""
    from archon.cli import settings, stack

    found = settings.load(config, settings.flags({"data_dir": data_dir}))
    stack.logs(found, name, follow, lines)


@app.command(
    context_settings={
        "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": [],
    }
)  # fmt: skip
def rollout(context: typer.Context) -> None:
    """Let agents play tasks: archon rollout --tasks FILE --agent COMMAND."""
    from archon.cli.rollout import app as rollout_app

    command = typer.main.get_command(rollout_app)
    code = command.main(context.args, prog_name="archon rollout", standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)


@session_app.command()
def start(
    task: Annotated[str | None, typer.Option(help="Task id.")] = None,
    group: Annotated[str | None, typer.Option(help="Group id.")] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Sessions in a group.")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy id.")] = None,
    refresh: Annotated[
        str | None, typer.Option(metavar="KEY", help="Open the next session of this key.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
    gateway: Gateway = None,
    key: Key = None,
    data_dir: DataDir = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Open a session (or a group of them) and print its address and key."""
    from archon.cli import sessions

    client = sessions.connect(gateway, key, data_dir, config)
    sessions.start(client, task, group, group_size, policy, refresh, label or [], as_json)


def _reward(
    value: Value,
    session: SessionId = None,
    interaction: Interaction = None,
    component: Component = None,
    source: Source = None,
    idempotency_key: IdempotencyKey = None,
    gateway: Gateway = None,
    key: Key = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Score a session, or one call of it."""
    from archon.cli import sessions

    client = sessions.connect(gateway, key, data_dir, config)
    sessions.reward(client, value, session, interaction, component, source, idempotency_key)


app.command("reward", context_settings=_NEGATIVE_NUMBERS)(_reward)
session_app.command("reward", context_settings=_NEGATIVE_NUMBERS)(_reward)


@session_app.command()
def end(
    session: SessionId = None,
    gateway: Gateway = None,
    key: Key = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """Close a session."""
    from archon.cli import sessions

    sessions.end(sessions.connect(gateway, key, data_dir, config), session)


@key_app.command()
def create(
    policy: Annotated[str | None, typer.Option(help="Policy that the key is for.")] = None,
    label: Annotated[str, typer.Option(help="A name for people.")] = "",
    expires_in: Annotated[
        float | None, typer.Option(metavar="HOURS", min=0, help="Hours until it ends.")
    ] = None,
    gateway: Gateway = None,
    key: Key = None,
    data_dir: DataDir = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Make an API key; it is shown once."""
    from archon.cli import keys, sessions

    keys.create(
        sessions.connect(gateway, key, data_dir, config), policy, label, expires_in, as_json
    )


@key_app.command("list")
def list_(
    gateway: Gateway = None,
    key: Key = None,
    data_dir: DataDir = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """List the API keys, by the ids that they are known by."""
    from archon.cli import keys, sessions

    keys.list_keys(sessions.connect(gateway, key, data_dir, config), as_json)


@key_app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="Id, or its beginning, as in the list.")],
    gateway: Gateway = None,
    key: Key = None,
    data_dir: DataDir = None,
    config: Config = None,
) -> None:
    """End the validity of a key at once."""
    from archon.cli import keys, sessions

    keys.revoke(sessions.connect(gateway, key, data_dir, config), key_id)
