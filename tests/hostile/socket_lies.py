"""What may listen on a server's port without being one: each is told of a new connection and may write to it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

Listener = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

# An empty SETTINGS frame: what an HTTP/2 server says first.
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x28"


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads all, answers nothing."""
    while await reader.read(2**16):
        pass


async def reads_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Half a connection: it greets as HTTP/2 does, then neither reads nor writes."""
    writer.write(SETTINGS)
    await writer.drain()
    await asyncio.sleep(3_600)


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """At once."""


async def closes_after_a_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(SETTINGS)
    await reader.read(2**16)


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\xff" * 5_000)
    await writer.drain()
    await reader.read(2**16)


async def alerts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a server behind TLS does it."""
    await reader.read(100)
    writer.write(TLS_ALERT)
    await writer.drain()


def serving(listener: Listener) -> Listener:
    """The listener, with the connection closed at its end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                await listener(reader, writer)
        finally:
            writer.close()

    return serve
