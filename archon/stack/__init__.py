"""The embedded stack; see README.md in this folder."""

from pathlib import Path


def database_url(data_dir: Path) -> str:
    """The URL of the embedded PostgreSQL of an installation. LookupError where it has none."""
    from archon.stack.postgres import existing_url

    folder = data_dir.absolute()
    url = existing_url(folder / "postgres", folder / "secrets" / "postgres.password")
    if url is None:
        raise LookupError(f"{folder} holds no PostgreSQL of Archon's; was `archon up` run there?")
    return url
