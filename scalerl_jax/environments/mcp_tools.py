"""MCP servers as tools of an environment: McpServer is a toolset, see tools.py.

    the schemas     listed once per process that needs them, by a subprocess `python -m
                    scalerl_jax.environments.mcp_tools`: its event loop, threads and connections end with it, so that a
                    process that forks has none of them
    an episode      has its own session, a server process or an HTTP session, from its first call to its end
    between calls   the event loop of an episode is paused: a server that writes blocks until it is read

Limits of a server: `seconds` for a connection and for each call; LONGEST_MESSAGE and MOST_LINES; LISTING_BYTES for the
listing process, and environment.verifier_memory_bytes for an episode's. mcp_process.py ends a server's process with the
process that started it, also if the kernel killed that one.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TextIO

from scalerl_jax.environments.base import Row
from scalerl_jax.environments.worker_process import START_SECONDS, die_with_parent, worker_environment

LONGEST_MESSAGE = 4 * 2**20  # bytes of a line of a server's process, or of an HTTP response
MOST_LINES = 10_000  # of a server's process in an episode: each line with a request uses kilobytes until it is answered
LONGEST_TOOL = 2**16  # characters of a tool's schema as JSON
MOST_TOOLS = 128  # of a server
LONGEST_ERROR = 400  # characters
LISTING_BYTES = 2 * 2**30  # address space of the process that lists tools
CLOSE_SECONDS = 10.0
_PROCESS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mcp_process.py")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # required by the protocol


class ToolError(Exception):
    """A call to a server failed."""


class McpServer:
    """The tools of an MCP server.

    Args:
        command: starts a server that communicates over its pipes, in each episode; or
        url: address of a server with streamable HTTP.
        env: variables of the server's process, besides HOME, LOGNAME, PATH, SHELL, TERM and USER; it gets no others.
        headers: of each HTTP request.
        only: the server's names of the tools to use; None: all.
        prefix: prepended to the tools' names for the model.
        seconds: wall-clock limit of a connection and of each call; 5 more if the server does not even read.

    Raises ValueError if both command and url are given, or neither.
    """

    def __init__(
        self,
        *,
        command: Sequence[str | os.PathLike[str]] = (),
        url: str = "",
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        prefix: str = "",
        seconds: float = 30.0,
    ):
        if isinstance(command, str) or bool(command) == bool(url):
            raise ValueError("McpServer takes either command=[PROGRAM, ...] or url=...")
        if command and sys.platform != "linux":
            raise ValueError("McpServer(command=...) needs Linux, which ends its processes; start it, and give its url")
        self.command, self.url = [os.fspath(part) for part in command], url
        self.env, self.headers = dict(env or {}), dict(headers or {})
        self.only, self.prefix, self.seconds = None if only is None else list(only), prefix, seconds

    def __str__(self) -> str:
        return f"MCP server {self.url or shlex.join(self.command)}"

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools' JSON schemas. Raises ValueError, one line, if the server or one of its tools is not available."""
        try:
            import mcp  # noqa: F401 (here, as a fork that opens a session then has it)
        except ImportError as error:
            raise ValueError(f"{self}: needs the package mcp: pip install 'scalerl-jax[mcp]'") from error
        command = [sys.executable, "-m", "scalerl_jax.environments.mcp_tools"]
        asked = json.dumps({"parent": os.getpid(), "server": vars(self)}).encode()
        limit = START_SECONDS + self.seconds
        try:
            listed = subprocess.run(
                command, input=asked, capture_output=True, timeout=limit, env=worker_environment(), check=False
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"{self}: its tools are not listed within {limit:g} s") from None
        if listed.returncode:
            lines = listed.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {listed.returncode}"]
            raise ValueError(f"{self}: its tools cannot be listed: {lines[-1][:LONGEST_ERROR]}")
        reply = json.loads(listed.stdout)
        if "error" in reply:
            raise ValueError(f"{self}: {reply['error']}")
        return reply["schemas"]

    def open(self, row: Row) -> "_McpSession":
        return _McpSession(self)

    @contextlib.asynccontextmanager
    async def connected(self, errors: TextIO) -> AsyncIterator[Any]:
        """A connected client of the package mcp. errors: a file that receives the last line of mcp_process.py.

        Raises any exception of that package, in exception groups.
        """
        import httpx2
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client

        async with asyncio.timeout(self.seconds) as limit, contextlib.AsyncExitStack() as stack:
            if self.url:
                # A response may be a stream that stays open, so only the call's limit applies to reading.
                http = httpx2.AsyncClient(
                    headers={"Accept-Encoding": "identity", **self.headers},
                    timeout=httpx2.Timeout(self.seconds, read=None),
                    event_hooks={"response": [_bound]},
                )
                await stack.enter_async_context(http)
                transport = streamable_http_client(self.url, http_client=http, max_sse_event_size=LONGEST_MESSAGE)
            else:
                limits = [str(os.getpid()), str(LONGEST_MESSAGE), str(MOST_LINES)]
                arguments = ["-I", "-S", _PROCESS, *limits, *self.command]
                started = StdioServerParameters(
                    command=sys.executable, args=arguments, env=self.env, encoding_error_handler="replace"
                )
                transport = stdio_client(started, errlog=errors)
            # "legacy" is the protocol with sessions: its successor keeps no state between calls.
            client = await stack.enter_async_context(Client(transport, mode="legacy", cache=None))
            limit.reschedule(None)
            yield client

    async def listed(self) -> list[Mapping[str, Any]]:
        """The schemas, from the server; runs in the listing process. Raises ValueError, without the server's name."""
        tools: list[Any] = []
        with tempfile.TemporaryFile("w+") as errors:
            try:
                async with self.connected(errors) as client, asyncio.timeout(self.seconds):
                    cursor = None
                    while True:
                        page = await client.list_tools(cursor=cursor)
                        tools += [tool for tool in page.tools if self.only is None or tool.name in self.only]
                        cursor = page.next_cursor
                        if cursor is None or len(tools) > MOST_TOOLS:
                            break
            except Exception as error:  # of httpx, anyio, pydantic, mcp and the system
                raise ValueError(self.why(error, errors)) from error
        if len(tools) > MOST_TOOLS:
            raise ValueError(f"has more than {MOST_TOOLS} tools; choose some by only=[...]")
        for name in self.only or ():
            if name not in {tool.name for tool in tools}:
                raise ValueError(f"has no tool {name!r}")
        if not tools:
            raise ValueError("has no tools")
        return [self._schema(tool) for tool in tools]

    def _schema(self, tool: Any) -> Mapping[str, Any]:
        name, parameters = self.prefix + tool.name, {"properties": {}, **tool.input_schema}
        if not _NAME.fullmatch(name):
            raise ValueError(f"tool {name[:128]!r}: a name has 1 to 128 of A-Z, a-z, 0-9, _, . and -")
        function = {"name": name, "description": tool.description or "", "parameters": parameters}
        if (length := len(json.dumps(function))) > LONGEST_TOOL:
            raise ValueError(f"tool {name}: is described by {length} characters, more than {LONGEST_TOOL}")
        return {"type": "function", "function": function}

    def why(self, error: BaseException, errors: TextIO) -> str:
        """The reason of a failure, in one line."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"no answer within {self.seconds:g} s"
        errors.seek(0)
        message = str(error).partition("For further information")[0] or type(error).__name__  # pydantic's address
        lines = filter(None, (message, errors.read(LONGEST_ERROR)))
        return " ".join(": ".join(lines).split())[:LONGEST_ERROR]


class _McpSession:
    """An episode's session with a server, from its first call on. If it fails to start or ends, it is not restarted."""

    def __init__(self, server: McpServer):
        self._server, self._runner = server, asyncio.Runner()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        self._task: asyncio.Task[None] | None = None

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises ToolError."""
        json.dumps(arguments, ensure_ascii=False).encode()  # half a surrogate pair would end the session
        result = self._runner.run(self._call(name.removeprefix(self._server.prefix), dict(arguments)))
        texts = [content.text if content.type == "text" else f"[{content.type}]" for content in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        if result.is_error:
            raise ToolError("\n".join(texts))
        return "\n".join(texts)

    def close(self) -> None:
        with self._runner, self._errors:
            self._runner.run(self._end())

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._task is None:
            self._opened, self._closing = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._task = asyncio.create_task(self._live())
        try:
            client = await self._opened
            async with asyncio.timeout(self._server.seconds):
                return await client.call_tool(name, arguments)
        except Exception as error:  # noqa: BLE001 (as above)
            raise ToolError(self._server.why(error, self._errors)) from None

    async def _live(self) -> None:
        """Runs in a separate task, since the task that opens the connection has to close it."""
        try:
            async with self._server.connected(self._errors) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 (as above)
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _end(self) -> None:
        if self._task is not None:
            self._closing.set()
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)


async def _bound(response: Any) -> None:
    """Limits a response to LONGEST_MESSAGE bytes, and rejects compressed ones, which could grow when decompressed."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            length = 0
            async for data in stream:
                length += len(data)
                if length > LONGEST_MESSAGE or response.headers.get("content-encoding", "identity") != "identity":
                    raise httpx2.StreamError(f"it is compressed, or has more than {LONGEST_MESSAGE} bytes")
                yield data

        async def aclose(self) -> None:
            await stream.aclose()

    stream, response.stream = response.stream, Bounded()


def main() -> None:
    """Lists the tools of the server that standard input names; ends with the process that waits for them."""
    die_with_parent()
    asked = json.load(sys.stdin)
    if asked["parent"] != os.getppid():
        return  # the parent has ended already
    logging.disable(logging.CRITICAL)  # the package mcp logs each line that it cannot parse
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError):  # the limit is already lower
        resource.setrlimit(resource.RLIMIT_AS, (LISTING_BYTES, most))
    try:
        reply: dict[str, Any] = {"schemas": asyncio.run(McpServer(**asked["server"]).listed())}
    except ValueError as error:
        reply = {"error": str(error)}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
