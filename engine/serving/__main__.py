"""Start an embedded engine: `python -m engine.serving --port 8100`.

It listens at once and serves nothing until an update has given it weights.
"""

import argparse
import asyncio
import ipaddress
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from archon.standing_back import REPLICA, stand_back
from engine.serving.server import DTYPES, Engine, Options


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="engine.serving", description="The embedded engine.")
    parser.add_argument("--host", default=Options.host)
    parser.add_argument("--port", type=int, default=0, help="0: a free port, named in the log")
    parser.add_argument("--control-token-file", type=Path, help="without it, loopback only")
    parser.add_argument("--max-batch", type=int, default=Options.max_batch, help="rows of a step")
    parser.add_argument("--max-queue", type=int, default=Options.max_queue, help="then 503")
    parser.add_argument("--max-model-len", type=int, help="default: the model's own, up to 4096")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=Options.dtype)
    parser.add_argument("--threads", type=int, default=Options.threads, help="of a forward pass")
    raw = parser.parse_args(arguments)
    for name in ("max_batch", "max_queue", "max_model_len", "threads"):
        value = getattr(raw, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    token: str | None = None
    if raw.control_token_file is not None:
        token = raw.control_token_file.read_text().strip()
        if not token:
            parser.error(f"{raw.control_token_file} is empty: it must hold the control token")
    elif not _is_loopback(raw.host):
        parser.error(f"--host {raw.host} is not loopback: give a --control-token-file")
    return Options(
        host=raw.host,
        port=raw.port,
        token=token,
        max_batch=raw.max_batch,
        max_queue=raw.max_queue,
        max_model_len=raw.max_model_len,
        dtype=raw.dtype,
        threads=raw.threads,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def main() -> int:
    """The exit code: 1 when the decoding thread failed."""
    stand_back(REPLICA)
    engine = Engine(parse())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(engine.options.threads)
    # The decoding thread gives up the GIL in every operator: a long switch interval would make it
    # wait that long each time that the HTTP side has something to do.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(engine.run(lambda port: None))
    return int(engine.crashed)


if __name__ == "__main__":
    sys.exit(main())
