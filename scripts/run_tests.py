"""Run the tests in groups, print the minutes of each, fail if any group fails.

``python scripts/run_tests.py [GROUP …]``; without names all ordinary groups run.
"""

import subprocess
import sys
import time

GROUPS = {
    "unit": ["-m", "not stack and not kill and not demo and not slow"],
    "stack": ["-m", "stack and not kill and not demo and not slow"],
    "kill": ["-m", "kill and not slow"],
    "demo": ["-m", "demo and not slow"],
    "slow": ["-m", "slow"],
}
ORDINARY = ("unit", "stack", "kill", "demo")


def main(names: list[str]) -> int:
    chosen = names or list(ORDINARY)
    if unknown := [name for name in chosen if name not in GROUPS]:
        print(f"unknown group {', '.join(unknown)}; known: {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    minutes: dict[str, tuple[float, int]] = {}
    for name in chosen:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        code = subprocess.call([sys.executable, "-m", "pytest", "-q", *GROUPS[name]])
        minutes[name] = ((time.monotonic() - start) / 60, code)
    for name, (spent, code) in minutes.items():
        print(f"{name:10} {spent:5.1f} min  {'passed' if code == 0 else f'FAILED ({code})'}")
    return max(code for _, code in minutes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
