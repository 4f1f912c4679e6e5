"""One engine: the decoding thread and the HTTP server before it, from start to stop."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
import uvicorn

import archon
from engine.serving.app import App
from engine.serving.runner import Runner
from engine.serving.scheduler import Scheduler

log = logging.getLogger("archon.engine")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Options:
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    max_batch: int = 64
    max_queue: int = 256
    max_model_len: int | None = None
    dtype: str = "float32"
    threads: int = 1


class Engine:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.runner = Runner(options.max_batch, options.max_model_len, DTYPES[options.dtype])
        self.crashed = False
        self._server: uvicorn.Server | None = None

    async def run(self, listening: Callable[[int], None]) -> None:
        """Serve until `stop`, a signal or a crash; `listening` is told the port."""
        options = self.options
        scheduler = Scheduler(
            self.runner,
            max_queue=options.max_queue,
            threads=options.threads,
            loop=asyncio.get_running_loop(),
            on_crash=self._on_crash,
        )
        build = f"archon-{archon.__version__}"
        app = App(scheduler, options.token, secrets.token_hex(4), build)
        self._server = uvicorn.Server(
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
        try:
            with _bind(options.host, options.port) as bound:
                port = bound.getsockname()[1]
                log.info("instance %s, %s port %d, empty", app.instance, options.host, port)
                listening(port)
                await self._server.serve(sockets=[bound])
        finally:
            scheduler.stop()

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True

    def _on_crash(self) -> None:
        self.crashed = True
        self.stop()


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    bound.listen(128)
    return bound
