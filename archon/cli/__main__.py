"""``python -m archon.cli`` is the command ``archon``."""

from archon.cli import main

if __name__ == "__main__":
    main()
