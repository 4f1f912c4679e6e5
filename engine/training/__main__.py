"""`python -m engine.training [--threads N]`: see `engine/training/process.py`."""

from __future__ import annotations

import argparse
import os
import sys

from archon.standing_back import TRAINER, stand_back
from engine.training.process import end_with_parent, refuse_more_ranks, serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.training")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the arithmetic")
    arguments = parser.parse_args()
    end_with_parent()
    stand_back(TRAINER)
    try:
        refuse_more_ranks()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # Whatever a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Seconds long: the parent is watched from before it.
    import torch

    from engine.training.trainer import Trainer

    torch.set_num_threads(arguments.threads)
    serve(Trainer(), sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
