"""Where the gateway listens, and its HTTP server."""

import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from starlette.applications import Starlette


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError where nothing can listen there."""
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


async def serve(app: Starlette, listening: socket.socket, *, over: Callable[[], bool], **settings: Any) -> None:
    """Until `over`, or cancelled. settings: of uvicorn.Config."""

    class Server(uvicorn.Server):
        """Ends with the command's own signals, in the place of handlers of its own."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or over()

    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5, **settings)
    await Server(config).serve(sockets=[listening])
