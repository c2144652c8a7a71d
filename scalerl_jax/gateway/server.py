"""The gateway's listening socket, its HTTP server, and a check that its packages are installed."""

import asyncio
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


async def serve(
    app: Any, listening: socket.socket, *, over: Callable[[], bool], grace_seconds: int = 5, **settings: Any
) -> None:
    """Serves an ASGI application until `over` returns true, or cancelled. settings: of uvicorn.Config.

    Requests that are not answered grace_seconds after that are answered with 503, which clients repeat, or cut off.
    """
    import uvicorn
    from starlette.responses import JSONResponse

    async def answered(scope: Any, receive: Any, send: Any) -> None:
        began = False

        async def noted(message: Any) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError:
            if not began:
                message = "the server is stopping"
                answer = JSONResponse({"detail": message, "error": {"message": message, "type": "server_error"}}, 503)
                await answer(scope, receive, send)

    class HttpServer(uvicorn.Server):
        """Leaves signals to the command instead of installing its own handlers."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

        async def on_tick(self, counter: int) -> bool:
            return await super().on_tick(counter) or over()

    config = uvicorn.Config(
        answered, log_level="warning", lifespan="off", timeout_graceful_shutdown=grace_seconds, **settings
    )
    await HttpServer(config).serve(sockets=[listening])
