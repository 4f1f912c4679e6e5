"""The logs of the processes: one bounded file each, written by the process itself.

Invariant: a log and its predecessor stay below about twice ``LIMIT_BYTES``, and a process never
blocks on, or dies with, whoever reads its log.
"""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

LIMIT_BYTES = 16 << 20


def log_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def open_log(path: Path) -> int:
    """A descriptor that appends, for a child's output."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def trim(path: Path, limit: int = LIMIT_BYTES) -> None:
    """Keep a log that is over ``limit`` as ``NAME.log.1`` and go on with an empty one.

    The writer has it open for appending, so it is emptied in place.
    """
    try:
        if path.stat().st_size <= limit:
            return
    except FileNotFoundError:
        return
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    os.truncate(path, 0)


async def trim_for_ever(folder: Path, every: float = 10.0) -> None:
    while True:
        await asyncio.sleep(every)
        for path in folder.glob("*.log"):
            await asyncio.to_thread(trim, path)


def last_lines(path: Path, count: int) -> list[str]:
    """The last ``count`` lines, read from the last 256 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (256 << 10)))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


class Follower:
    """What is appended to some files, with the name of each."""

    def __init__(self, paths: list[Path]) -> None:
        self._positions = {path: path.stat().st_size if path.exists() else 0 for path in paths}

    def new_lines(self) -> Iterator[tuple[str, str]]:
        """(name, line) of whole lines since the last call."""
        for path, position in self._positions.items():
            if not path.exists():
                continue
            if path.stat().st_size < position:
                position = 0
            with path.open("rb") as file:
                file.seek(position)
                data = file.read(1 << 20)
            whole = data[: data.rfind(b"\n") + 1]
            self._positions[path] = position + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                yield path.stem, line
