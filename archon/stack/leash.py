"""Runs a command that dies with whoever holds the other end of our stdin.

For systems without a parent-death signal: ``python -m archon.stack.leash SIGNAL COMMAND…``.
"""

import os
import signal
import subprocess
import sys
import threading
from types import FrameType


def main(arguments: list[str]) -> int:
    death, command = int(arguments[0]), arguments[1:]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        child.send_signal(death)

    def forward(signum: int, _: FrameType | None) -> None:
        child.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, forward)
    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
