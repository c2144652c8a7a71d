"""The HTTP server at its end. 1 s of CPU."""

import asyncio
import contextlib
import logging

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from scalerl_jax.gateway.server import listen, serve


def test_requests_that_are_cut_off_at_its_end_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    """With 503 and no traceback, or, where an answer has begun, with what there is of it."""
    waiting = asyncio.Event()

    async def poll(request: Request) -> Response:
        waiting.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def stream(request: Request) -> Response:
        async def parts():
            yield b"first"
            await asyncio.Event().wait()

        return StreamingResponse(parts())

    async def talk() -> None:
        over, app = False, Starlette(routes=[Route("/poll", poll), Route("/stream", stream)])
        listening = listen("127.0.0.1", 0)
        listening.listen()
        serving = asyncio.create_task(serve(app, listening, over=lambda: over, grace_seconds=1))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            polled = asyncio.create_task(http.get("/poll"))
            async with http.stream("GET", "/stream") as streamed:
                parts = streamed.aiter_raw()
                assert await anext(parts) == b"first"
                await waiting.wait()
                over = True
                await serving
                with contextlib.suppress(httpx.RemoteProtocolError):
                    assert [part async for part in parts] == []
            answer = await polled
        assert answer.status_code == 503 and answer.json()["detail"] == "the server is stopping"
        assert answer.json()["error"]["type"] == "server_error"

    with caplog.at_level(logging.WARNING):
        asyncio.run(talk())
    assert "Traceback" not in caplog.text and not any(record.exc_info for record in caplog.records)
