"""A process that stands back has the priority that it asked for."""

import os
import subprocess
import sys

PROGRAM = """
import os
from archon.standing_back import stand_back
stand_back(7)
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_it_is_nicer_by_what_was_asked() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == min(before + 7, 19)
