"""The gateway's listening socket, its HTTP server, and a check that its packages are installed."""

import contextlib
import importlib.util
import socket
from collections.abc import Callable, Generator
from typing import Any


def check_installed() -> None:
    """Raises ValueError, one line, if a package that the gateway needs is missing."""
    for package in ("prometheus_client", "starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{package} is not installed: pip install 'scalerl-jax[gateway]' brings it")


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to host:port. Raises OSError if that fails."""
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
    """Serves an ASGI application until `over` returns true, or cancelled. settings: of uvicorn.Config."""
    import uvicorn

    class HttpServer(uvicorn.Server):
        """Leaves signals to the command instead of installing its own handlers."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or over()

    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5, **settings)
    await HttpServer(config).serve(sockets=[listening])
