"""Where the gateway listens, its HTTP server, and whether what that is made of is installed."""

import contextlib
import importlib.util
import socket
from collections.abc import Callable, Generator
from typing import Any


def check_installed() -> None:
    """Raises ValueError, one line, without the packages that the gateway is made of."""
    for package in ("prometheus_client", "starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is not installed: pip install 'scalerl-jax[gateway]' brings it")


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


async def serve(app: Any, listening: socket.socket, *, over: Callable[[], bool], **settings: Any) -> None:
    """Serves an ASGI application until `over`, or cancelled. settings: of uvicorn.Config."""
    import uvicorn

    class Server(uvicorn.Server):
        """Ends with the command's own signals, in the place of handlers of its own."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or over()

    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5, **settings)
    await Server(config).serve(sockets=[listening])
