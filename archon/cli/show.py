"""What a rollout shows: one live line while it goes, a table at its end."""

import statistics
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from archon.records.messages import MemberResult, PolicyStatus

_RECENT = 200
_PLAIN_EVERY_S = 10.0
_ERRORS_SHOWN = 5


class Show:
    """On a terminal the line is redrawn; elsewhere it is printed now and then."""

    def __init__(self, episodes: int) -> None:
        self._episodes, self._begun = episodes, time.monotonic()
        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._printed = self._begun

    def __enter__(self) -> "Show":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(
        self,
        results: Sequence[MemberResult],
        failed: int,
        resumed: int,
        status: PolicyStatus | None,
    ) -> None:
        line = self._line(results, failed, resumed, status)
        now = time.monotonic()
        if self._console.is_terminal:
            self._live.update(Text(line, no_wrap=True))
        elif now - self._printed > _PLAIN_EVERY_S:
            self._printed = now
            print(line, flush=True)

    def _line(
        self,
        results: Sequence[MemberResult],
        failed: int,
        resumed: int,
        status: PolicyStatus | None,
    ) -> str:
        played = sum(r.ok for r in results)
        recent = [r.reward for r in results[-_RECENT:] if r.reward is not None]
        parts = [
            f"episodes {played}/{self._episodes}",
            f"{played / (time.monotonic() - self._begun + 1e-9):.1f}/s",
            f"reward {statistics.fmean(recent):.3f}" if recent else "reward –",
        ]
        if status is not None:
            parts.append(f"live v{status.live}, head v{status.head} ({status.phase})")
        if resumed:
            parts.append(f"{resumed} groups from before")
        if lost := len(results) - played:
            parts.append(f"{lost} lost")
        if failed:
            parts.append(f"{failed} failed")
        return "  ".join(parts)

    @staticmethod
    def table(rows: Sequence[tuple[str, str]], errors: Sequence[str]) -> None:
        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        console = Console()
        console.print(table)
        for error in errors[:_ERRORS_SHOWN]:
            console.print(f"lost: {error}", highlight=False, markup=False)
        if len(errors) > _ERRORS_SHOWN:
            console.print(f"… and {len(errors) - _ERRORS_SHOWN} more")
        sys.stdout.flush()
