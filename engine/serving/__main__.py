"""Start an embedded engine: `python -m engine.serving --port 8100`.

It listens at once and serves nothing until an update has given it weights.
"""

import argparse
import asyncio
import ipaddress
import logging
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import uvicorn

import archon
from engine.serving.app import App
from engine.serving.runner import Runner
from engine.serving.scheduler import Scheduler

log = logging.getLogger("archon.engine")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.serving", description="The embedded engine.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free port, named in the log")
    parser.add_argument("--control-token-file", type=Path, help="without it, loopback only")
    parser.add_argument("--max-batch", type=int, default=64, help="requests that run together")
    parser.add_argument("--max-queue", type=int, default=256, help="requests that wait, then 503")
    parser.add_argument(
        "--max-model-len", type=int, help="default: the model's own, at most 4096 tokens"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of one forward pass")
    options = parser.parse_args(arguments)
    for name in ("max_batch", "max_queue", "max_model_len", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.control_token_file is None and not _is_loopback(options.host):
        parser.error(f"--host {options.host} is not loopback: give a --control-token-file")
    return options


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    token = path.read_text().strip()
    if not token:
        raise ValueError(f"{path} is empty: it must hold the control token")
    return token


async def serve(options: argparse.Namespace) -> int:
    """The exit code: 1 when the decoding thread failed."""
    token = _token(options.control_token_file)
    runner = Runner(options.max_batch, options.max_model_len, DTYPES[options.dtype])
    crashed = False

    def on_crash() -> None:
        nonlocal crashed
        crashed = server.should_exit = True

    scheduler = Scheduler(
        runner,
        max_queue=options.max_queue,
        threads=options.threads,
        loop=asyncio.get_running_loop(),
        on_crash=on_crash,
    )
    app = App(scheduler, token, secrets.token_hex(4), f"archon-{archon.__version__}")
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
    )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
        port = listening.getsockname()[1]
        log.info("instance %s listens on %s port %d, empty", app.instance, options.host, port)
        await server.serve(sockets=[listening])
    scheduler.stop()
    return int(crashed)


def main() -> int:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(options.threads)
    # The decoding thread gives up the GIL in every operator: a long switch interval would make it
    # wait that long each time that the HTTP side has something to do.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=uvicorn.Config(serve).get_loop_factory()) as runner:
        return runner.run(serve(options))


if __name__ == "__main__":
    sys.exit(main())
