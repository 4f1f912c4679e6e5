"""The embedded inference engine: a process of its own, started by `python -m engine.serving`."""
