"""``python -m gateway``: the gateway process.

Invariant: SIGTERM ends it within about three seconds, calls that are running as if their clients
had left. A configuration that cannot be served safely ends it at once, with the reason.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop
from pydantic import ValidationError

from archon.settings import Settings
from gateway.app import create_app
from gateway.service import Service, build

log = logging.getLogger("archon.gateway")
GRACE = 1


class _CutOnPurpose(logging.Filter):
    """A stream that broke off is cut without its end; uvicorn takes that for a mistake."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


class Server(uvicorn.Server):
    """Ends with 0 when it is asked to end, where uvicorn would die of the signal once more."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._service.end_calls(GRACE))
        await super().shutdown(sockets)
        await ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self.handle_exit)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for bound in server.sockets:
                host, port = bound.getsockname()[:2]
                print(f"listening on http://{host}:{port}", flush=True)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn.error").addFilter(_CutOnPurpose())
    try:
        settings = Settings()
        service = build(settings)
    except (ValidationError, ValueError) as error:
        print(f"gateway: {error}", file=sys.stderr, flush=True)
        return 2
    config = uvicorn.Config(
        create_app(service),
        host=settings.gateway.host,
        port=settings.gateway.port,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE + 3,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    server = Server(config, service)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve())
    return 0 if server.started else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
