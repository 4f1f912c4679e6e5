"""The command ``archon``.

Invariant: an error the user can mend is one message that says what to do, and a non-zero exit
code; never a traceback. Nothing heavy is imported before the command that needs it.
"""

import os
import sys


def main() -> None:
    """Run a command and end the process.

    By ``os._exit``: Temporal's client aborts in about half of all ordinary interpreter exits.
    """
    from archon.cli.app import run

    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
