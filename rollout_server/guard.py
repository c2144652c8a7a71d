"""The guard between gRPC and the methods of every service of a server, health and reflection included.

    too long, or not a message      INVALID_ARGUMENT, and the message is not read (PushWeights has its own bound for a
                                    chunk, see contract/chunks.py)
    too many calls of a method      RESOURCE_EXHAUSTED, so that no method can occupy the whole server
    no message comes, or nothing    DEADLINE_EXCEEDED: a client that does not send, or does not read, does not hold its
    is read for long                place forever
    a bug of the server             UNKNOWN, with its traceback in the log, a few times a minute
    details of an error             one line of at most 1 KiB

A message's length is checked before it is parsed: protobuf may make an object of every two bytes, on the event loop.
"""

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import grpc

from scalerl_jax.contract import peer_text, rpc

MOST = 20  # lines of one kind
WINDOW_SECONDS = 60.0


class QuietLog:
    """Log lines that a client can cause: at most MOST of each kind a minute, so that a flood fills no disk.

    The next line that is logged is preceded by the number left out. Lives on one event loop.
    """

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic):
        self._log, self._clock = log, clock
        self._windows: dict[str, _Window] = {}

    def log(self, kind: str, level: int, text: str, *values: object, exception: bool = False) -> None:
        """Logs a line or counts it as left out. kind: one of a few fixed words. exception: adds the traceback."""
        now = self._clock()
        window = self._windows.setdefault(kind, _Window(now))
        if now - window.began >= WINDOW_SECONDS:
            if window.left_out:
                self._log.log(level, "%d lines like the next one were left out", window.left_out)
            window = self._windows[kind] = _Window(now)
        if window.logged < MOST:
            window.logged += 1
            self._log.log(level, text, *values, exc_info=exception)
        else:
            window.left_out += 1


class _Window:
    def __init__(self, began: float):
        self.began, self.logged, self.left_out = began, 0, 0


# A client that reads nothing of an answer for so long is dropped.
UNREAD_SECONDS = 120.0

# How long the status of a call whose client reads nothing may still take to be sent.
FAREWELL_SECONDS = 1.0

# How long the one message of a call that is no stream may take to come.
MESSAGE_SECONDS = 30.0

# How long a stream with a malformed message is still read, so that its client receives the reason.
DRAIN_SECONDS = 0.2

log = logging.getLogger(__name__)


class Bound(NamedTuple):
    """Limits of one method."""

    calls: int  # at a time
    bytes: int  # of a message


OTHERS = Bound(calls=32, bytes=2**16)  # of a method without its own bound


class MalformedMessage(Exception):
    """The bytes received are not a message, or too long."""


class CallContext:
    """Wraps a call's context; subclasses override some methods."""

    def __init__(self, context: grpc.aio.ServicerContext):
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Guard(grpc.aio.ServerInterceptor):
    """Interceptor that must follow the token check and precede all others."""

    def __init__(self, bounds: Mapping[str, Bound], let_in: Callable[[str], None]):
        """bounds: by method, /package.Service/Name. let_in: called with the peer of every call that gets here."""
        self._bounds, self._let_in = bounds, let_in
        self._calls: collections.Counter[str] = collections.Counter()  # calls in progress, by method
        self._quiet = QuietLog(log)

    async def intercept_service(
        self, continuation: rpc.Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC answers UNIMPLEMENTED
            return handler
        method = handler_call_details.method
        longest, read = self._bounds.get(method, OTHERS).bytes, handler.request_deserializer

        def deserialize(data: bytes) -> Any:
            """Never raises: gRPC would log a traceback and answer UNKNOWN."""
            if len(data) > longest:
                return MalformedMessage(f"a message of {len(data)} bytes, at most {longest} are possible")
            try:
                return read(data)
            except Exception as error:  # noqa: BLE001 (whatever a codec raises: the bytes are the client's)
                return MalformedMessage(f"not a message of this method ({error})")

        async def serve(messages: Any, context: grpc.aio.ServicerContext) -> Any:
            return await self._serve(method, handler, _Context(context))

        # A stream to gRPC, whatever the method is: gRPC would wait for a single message before it calls `serve`.
        codecs = {"request_deserializer": deserialize, "response_serializer": handler.response_serializer}
        return rpc.handler(True, handler.response_streaming, serve, **codecs)

    async def _serve(self, method: str, handler: grpc.RpcMethodHandler, context: "_Context") -> Any:
        self._let_in(context.peer())
        most = self._bounds.get(method, OTHERS).calls
        if self._calls[method] >= most:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{most} such calls are being served already")
        self._calls[method] += 1
        try:
            return await _call(handler, context)
        except MalformedMessage as error:
            why = peer_text.printable(error)
            self._quiet.log("malformed", logging.WARNING, "%s from %s: %s", method, context.peer(), why)
            if handler.request_streaming:
                await context.drain()
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        except Stalled as error:
            self._quiet.log("stalled", logging.WARNING, "%s from %s: %s", method, context.peer(), error)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 (logged, and answered)
            if context.done():  # the client is gone, which gRPC reports by various exceptions
                raise asyncio.CancelledError from None
            self._quiet.log("fault", logging.ERROR, "%s from %s failed", method, context.peer(), exception=True)
            await context.abort(grpc.StatusCode.UNKNOWN, f"a fault of the server: {type(error).__name__}")
        finally:
            self._calls[method] -= 1


class Stalled(Exception):
    """The client does not send its message, or does not read its answers."""


async def _call(handler: grpc.RpcMethodHandler, context: "_Context") -> Any:
    request: Any = _messages(context) if handler.request_streaming else await _message(context)
    answers = getattr(handler, rpc.kind(handler.request_streaming, handler.response_streaming))(request, context)
    if not isinstance(answers, AsyncIterator):
        return await answers  # a single answer, or None if the method writes by itself
    async for answer in answers:
        await context.write(answer)
    return None


async def _message(context: "_Context") -> Any:
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            message = await context.read()
    except TimeoutError:
        raise Stalled(f"no message came for {MESSAGE_SECONDS:g} s") from None
    if message is grpc.aio.EOF:
        raise MalformedMessage("no message came")
    return message


async def _messages(context: "_Context") -> AsyncIterator[Any]:
    while (message := await context.read()) is not grpc.aio.EOF:
        yield message


class _Context(CallContext):
    """Raises for malformed messages and for unread answers, and shortens details."""

    _unread = False

    async def read(self) -> Any:
        message = await self._context.read()
        if isinstance(message, MalformedMessage):
            raise message
        return message

    async def drain(self) -> None:
        """Reads and drops pending messages: a call that ends during its client's write loses its error details."""
        with contextlib.suppress(TimeoutError, grpc.aio.BaseError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while await self._context.read() is not grpc.aio.EOF:
                    pass

    async def write(self, message: Any) -> None:
        """Raises Stalled where the client does not read."""
        try:
            async with asyncio.timeout(UNREAD_SECONDS):
                await self._context.write(message)
        except TimeoutError:
            self._unread = True
            raise Stalled(f"nothing was read for {UNREAD_SECONDS:g} s") from None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Always raises. The status waits behind unread answers; the call waits for it for a limited time."""
        try:
            async with asyncio.timeout(FAREWELL_SECONDS if self._unread else UNREAD_SECONDS):
                await self._context.abort(code, peer_text.details(details), trailing_metadata)
        except TimeoutError:
            raise asyncio.CancelledError from None
