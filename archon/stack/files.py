"""Folders and small files of an installation.

Invariant: a mode or an owner is set only on what this module made; a secret is never readable by
others, not for an instant; a file is replaced whole or not at all.
"""

import os
import secrets
import stat
import tempfile
from pathlib import Path

from archon.stack.errors import StackError
from archon.stack.process import ServiceUser


def make_folder(path: Path, mode: int, user: ServiceUser | None = None) -> bool:
    """Make ``path`` (and missing parents, 0755) unless it is there; True where it was made."""
    try:
        if not path.parent.is_dir():
            make_folder(path.parent, 0o755)
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise StackError(f"{path} is in the way: it is not a folder. Move it away.") from None
        return False
    except PermissionError as error:
        raise StackError(
            f"cannot make the folder {path}: {error.strerror}. "
            "Choose another with --data-dir, or make it and own it."
        ) from error
    if user is not None:
        os.chown(path, user.uid, user.gid)
    path.chmod(mode)
    return True


def write_file(path: Path, text: str, mode: int = 0o644, user: ServiceUser | None = None) -> None:
    """Replace ``path`` by a file of this text, durably."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
            if user is not None:
                os.fchown(file.fileno(), user.uid, user.gid)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def secret(path: Path, prefix: str = "") -> str:
    """The secret kept in ``path``; made once, 0600."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        value = prefix + secrets.token_urlsafe(32)
        write_file(path, value + "\n", 0o600)
        return value


def closed_to(path: Path, user: ServiceUser, need: int = stat.S_IXOTH) -> Path | None:
    """The first part of ``path`` that ``user`` cannot get through (or, for the last, use).

    ``need`` are the bits, written for *others*, that the last part must grant.
    """
    last = path.resolve()
    for part in dict.fromkeys([*_down_to(path.absolute()), *_down_to(last)]):
        wanted = need if part == last else stat.S_IXOTH
        try:
            info = part.stat()
        except FileNotFoundError:
            continue
        if info.st_uid == user.uid:
            granted = info.st_mode >> 6
        elif info.st_gid == user.gid:
            granted = info.st_mode >> 3
        else:
            granted = info.st_mode
        if granted & wanted != wanted:
            return part
    return None


def _down_to(path: Path) -> list[Path]:
    return [*reversed(path.parents), path]
