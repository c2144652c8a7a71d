"""MCP servers as tools: what they list, what a call gives, and what is left of them."""

import asyncio
import contextlib
import functools
import gzip
import http.server
import os
import subprocess
import sys
import threading

import psutil
import pytest

from scalerl_jax.config import Config
from scalerl_jax.environments import Completion as Turn
from scalerl_jax.environments import Row, Score, mcp_process
from scalerl_jax.environments.episode import Trajectory
from scalerl_jax.environments.load import make_environment
from scalerl_jax.environments.mcp_tools import McpServer
from scalerl_jax.environments.prompts import Prompts
from scalerl_jax.environments.tools import ToolEpisode, Tools
from tests.support.chat_folders import chat_folder
from tests.support.episodes import call, chat_pool, chat_turn, with_calls

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers' processes are ended by Linux")

# A server of the package itself: over pipes, or with an argument over HTTP, when it prints its port first.
SERVER = """
import os, socket, sys
import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
noted = []

@server.tool()
def note(text: str) -> str:
    "Notes a text; gives all of them."
    noted.append(text)
    return " ".join(noted)

@server.tool()
def divide(a: float, b: float) -> float:
    "Divides."
    if b == 0:
        raise ToolError("a division\\nby zero")
    return a / b

@server.tool()
def look() -> list:
    "Looks."
    return ["a picture", Image(data=b"123", format="png")]

@server.tool()
def variables() -> str:
    "The names of its variables."
    return " ".join(sorted(os.environ))

@server.tool()
def session(context: Context) -> str:
    "The session's name."
    return context.request_context.request.headers["mcp-session-id"]

if len(sys.argv) == 1:
    server.run()
else:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # what connects from here on waits
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical")).run(sockets=[listener])
"""

# A server that speaks the protocol by hand, and does as its first argument says when it is asked for that.
HOSTILE = """
import itertools, json, os, signal, subprocess, sys
how = sys.argv[1]

def say(**message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n")
    sys.stdout.flush()

def tool(name, schema={"type": "object"}, description=""):
    return {"name": name, "inputSchema": schema, "description": description}

def never():
    while True:
        signal.pause()

TOOLS = {
    "no object": [tool("a", "text")], "string": [tool("a", {"type": "string"})],
    "properties": [tool("a", {"type": "object", "properties": 3})],
    "twice": [tool("a"), tool("a")], "many": [tool(f"t{n}") for n in range(10_000)], "odd": [tool("a\\n/b")],
    "none": [], "long": [tool("a", description="x" * 100_000)], "longer": [tool("a", description="x" * 50_000_000)],
}
if how == "mute":
    never()
if how == "closes":
    sys.exit("there is no\\nlicence")
if how == "no line":
    while True:
        sys.stdout.write("x" * 65536)
if how == "flood":
    for number in itertools.count():
        say(method="notifications/message", params={"level": "info", "data": number})
for line in sys.stdin:
    asked = json.loads(line)
    method = asked.get("method")
    if method == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "h", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": TOOLS.get(how, [tool("a")])}
        if how == "pages":
            result["nextCursor"] = "again"
            result["tools"] = [tool(f"t{asked['id']}")]
    elif method == "tools/call":
        if how == "exits":
            sys.exit("it broke")
        if how == "mute later":
            never()
        if how == "hangs":  # with a process in a session of its own; both ids are in a file
            other = subprocess.Popen(["sleep", "600"], start_new_session=True)
            file = asked["params"]["arguments"]["file"]
            with open(file + ".part", "w") as out:
                out.write(f"{os.getpid()} {other.pid}")
            os.rename(file + ".part", file)
            never()
        if how == "no JSON":
            print("}{", flush=True)
            continue
        if how == "asks":  # and never reads the answers
            for number in itertools.count():
                say(id=f"q{number}", method="sampling/createMessage", params={"messages": [], "maxTokens": 1})
        content = [{"type": "text", "text": "x" * (50_000_000 if how == "large" else 3)}]
        result = {"content": 3 if how == "no content" else content}
    else:
        continue
    say(id=asked["id"], result=result)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    for name, text in (("server.py", SERVER), ("hostile.py", HOSTILE)):
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def url(files):
    process = subprocess.Popen([sys.executable, files / "server.py", "http"], stdout=subprocess.PIPE, text=True)
    with process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        process.kill()


def over_pipes(files, **options) -> McpServer:
    return McpServer(command=[sys.executable, str(files / "server.py")], seconds=300, **options)


def hostile(files, how: str, seconds: float = 300, **options) -> McpServer:
    return McpServer(command=[sys.executable, "-S", str(files / "hostile.py"), how], seconds=seconds, **options)


def listed(server: McpServer) -> list[str]:
    return [schema["function"]["name"] for schema in asyncio.run(server.listed())]


def results(episode: ToolEpisode, text: str) -> list[str]:
    return [message["content"] for message in episode.step(with_calls(text)).messages]


def playing(tools: Tools) -> contextlib.closing[ToolEpisode]:
    episode = ToolEpisode(Row("q"), tools, score=lambda row, turn: Score(1.0, True, {}), characters=2000)
    return contextlib.closing(episode)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def assert_gone(pids: list[int]) -> None:
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    assert not psutil.wait_procs(processes, timeout=600)[1]


def test_what_is_asked_for_is_checked():
    for options in ({}, {"command": ["a"], "url": "http://a"}, {"command": "a b"}):
        with pytest.raises(ValueError, match="takes either command"):
            McpServer(**options)


@pytest.mark.slow
def test_servers_of_both_kinds_beside_functions(files, url):
    """Each episode has a session of its own with each server, and leaves none behind."""

    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: the first
            b: the second
        """
        return a + b

    local = over_pipes(files, only=["note", "divide", "look", "variables"], env={"MINE": "1"})
    tools = Tools([add, local, McpServer(url=url, prefix="web.", headers={"X-Mine": "1"}, seconds=300)])
    threads, before = threading.active_count(), children()
    names = [schema["function"]["name"] for schema in tools.schemas()]
    assert names[:5] == ["add", "note", "divide", "look", "variables"]
    assert {"web.note", "web.session"} < set(names)
    assert threading.active_count() == threads and children() == before
    with playing(tools) as first, playing(tools) as second:
        turns = call("add", a=1, b=2) + call("note", text="a") + call("web.note", text="b") + call("note", text="c")
        assert results(first, turns) == ["3", "a", "b", "a c"]
        assert results(second, call("note", text="d")) == ["d"]
        sessions = [results(episode, call("web.session"))[0] for episode in (first, second, first)]
        assert sessions[0] == sessions[2] != sessions[1]
        assert results(first, call("look")) == ["a picture\n[image]"]
        variables = results(first, call("variables"))[0].split()
        assert "MINE" in variables and "PATH" in variables and "PYTEST_CURRENT_TEST" not in variables
        divided, unnamed, fine = results(first, call("divide", a=1, b=0) + call("note") + call("divide", a=1, b=2))
        assert divided.startswith("error: ToolError: ") and "a division by zero" in divided
        assert unnamed.startswith("error: ToolError: ") and "text" in unnamed and fine == "0.5"
        assert results(first, call("note", text="\ud800"))[0].startswith("error: UnicodeEncodeError")
        assert results(first, call("note", text="e")) == ["a c e"]
        assert first.step(Turn("right")).metrics["tool_errors"] == 3
    assert children() == before


LISTINGS = {
    "closes": r"Connection closed: licence",
    "mute": r"no answer within 2 s",
    "no line": r"it wrote a line of more than 4194304 bytes",
    "flood": r"it wrote more than 10000 lines",
    "no object": r"inputSchema",
    "string": r"inputSchema.type Input should be 'object'",
    "properties": r"inputSchema.properties",
    "many": r"has more than 128 tools",
    "pages": r"has more than 128 tools",
    "odd": r"tool 'a\\n/b': a name has",
    "none": r"has no tools",
    "long": r"tool a: is described by 10\d{4} characters, more than 65536",
    "longer": r"it wrote a line of more than 4194304 bytes",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LISTINGS)
def test_a_server_that_lists_nonsense_is_one_line(files, how):
    memory, before = psutil.Process().memory_info().rss, children()
    with pytest.raises(ValueError, match=LISTINGS[how]) as error:
        listed(hostile(files, how, seconds=2 if "no answer" in LISTINGS[how] else 300))
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) <= 400
    assert psutil.Process().memory_info().rss < memory + 2**28
    assert children() == before


@pytest.mark.slow
def test_a_server_that_cannot_be_had_is_named(files):
    for server, why in (
        (McpServer(command=["no-such-program", "b c"]), "MCP server no-such-program 'b c': .*No such file"),
        (McpServer(url="http://127.0.0.1:1/mcp"), "MCP server http://127.0.0.1:1/mcp: .*connect"),
        (hostile(files, "closes"), "MCP server .*hostile.py closes: Connection closed: licence"),
        (hostile(files, "", only=["b"]), "MCP server .*hostile.py '': has no tool 'b'"),
    ):
        with pytest.raises(ValueError, match=f"^{why}") as error:
            server.schemas()
        assert len(str(error.value).splitlines()) == 1
    with pytest.raises(ValueError, match=r"^tool a: there are two of this name"):
        Tools([hostile(files, "twice")]).schemas()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ValueError, match=r"^MCP server http://a: needs .*pip install 'scalerl-jax\[mcp\]'"):
        McpServer(url="http://a").schemas()


CALLS = {
    "exits": "Connection closed: it broke",
    "large": "Connection closed: it wrote a line of more than 4194304 bytes",
    "mute later": "no answer within 2 s",
    "no JSON": "no answer within 2 s",
    "asks": "it wrote more than 10000 lines",
    "no content": "content",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", CALLS)
def test_a_call_that_goes_wrong_is_an_error_to_read(files, monkeypatch, how):
    """And so is the next one, of the same session."""
    server = hostile(files, how)
    connected = server.connected

    @contextlib.asynccontextmanager
    async def hurried(errors):  # what comes before the call takes as long as it takes
        async with connected(errors) as client:
            server.seconds = 2 if "no answer" in CALLS[how] else 300
            yield client

    monkeypatch.setattr(McpServer, "schemas", lambda self: asyncio.run(self.listed()))
    memory, before = psutil.Process().memory_info().rss, children()
    with playing(Tools([server])) as episode:
        server.connected = hurried
        for expected in (CALLS[how], ""):
            (error,) = results(episode, call("a"))
            assert error.startswith("error: ToolError: ") and expected in error and len(error) < 600
    assert psutil.Process().memory_info().rss < memory + 2**28
    assert children() == before


class Badly(http.server.BaseHTTPRequestHandler):
    """Answers every request as its path says."""

    def do_POST(self):
        how = self.path[1:]
        if how == "hang":
            self.rfile.read()  # to the end, which comes with the client's
            return
        if how == "closes":
            return
        body = b'{"jsonrpc": "2.0", "id": 1, "result": "' + b"x" * (50_000_000 if how != "text" else 3) + b'"}'
        body = gzip.compress(body) if how == "gzip" else body
        self.send_response(500 if how == "status" else 200)
        self.send_header("Content-Type", "text/html" if how == "text" else "application/json")
        self.send_header("Content-Length", str(len(body)))
        if how == "gzip":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has seen enough
            self.wfile.write(body)

    def log_message(self, *_):
        pass


BADLY = {
    "hang": "no answer within 2 s",
    "closes": "disconnected",
    "large": "it is compressed, or has more than 4194304 bytes",
    "gzip": "it is compressed, or has more than 4194304 bytes",
    "text": "Unexpected content type: text/html",
    "status": "it is compressed, or has more than 4194304 bytes|error response",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", BADLY)
def test_a_server_that_answers_badly_over_http_is_one_line(how):
    memory = psutil.Process().memory_info().rss
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Badly) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_address[1]}/{how}"
        with pytest.raises(ValueError, match=BADLY[how]) as error:
            listed(McpServer(url=at, seconds=2 if how == "hang" else 300))
        server.shutdown()
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) <= 400
    assert psutil.Process().memory_info().rss < memory + 2**29  # the server's own 50 MB are in it


ENVIRONMENT = """
import sys
from scalerl_jax.environments.mcp_tools import McpServer

class Notes:
    tools = [
        McpServer(command=[sys.executable, {server!r}], prefix="my_", seconds=300),
        McpServer(url={url!r}, only=["note"], seconds=300),
        McpServer(command=[sys.executable, "-S", {hostile!r}, "hangs"], prefix="bad_", seconds=300),
    ]
    def rows(self, split):
        yield {{"prompt": "note"}}
    def score(self, row, completion):
        return completion == "right"
"""


@pytest.fixture
def pool(request, files, url, tmp_path):
    """Of an environment with a server of each kind; with the row and a turn of it."""
    servers = {name: str(files / f"{name}.py") for name in ("server", "hostile")}
    (tmp_path / "notes.py").write_text(ENVIRONMENT.format(url=url, **servers))
    config, tokenizer = Config(), chat_folder(tmp_path / "model", "qwen2_5")
    config.environment.name, config.environment.turn_seconds = (
        f"{tmp_path}/notes.py:Notes",
        getattr(request, "param", 300),
    )
    config.rollout.max_turns, config.rollout.thinking_budget_max = 4, 0
    config.rollout.thinking_budget_min = 0
    environment = make_environment(config)
    (row,) = Prompts(config, tokenizer).render_all(environment.rows("train"))

    with contextlib.closing(chat_pool(config, environment, tokenizer)) as pool:
        yield pool, row, functools.partial(chat_turn, tokenizer), tokenizer


@pytest.mark.slow
def test_a_whole_episode(pool):
    pool, row, turn, tokenizer = pool
    assert '"name": "my_divide"' in row.text and '"name": "note"' in row.text and "my_session" in row.text
    trajectory = Trajectory(turn(call("my_note", text="abc") + call("note", text="xyz")), "a:1")
    reply = pool.step(row, trajectory).result()
    text = tokenizer.decode(reply.token_ids)
    assert text.index("abc") < text.index("xyz")
    trajectory.add_reply(reply)
    trajectory.add_turn(turn("right"), "a:1")
    found = pool.step(row, trajectory).result()
    assert found.correct and found.metrics["tool_calls"] == 2 and found.metrics["tool_errors"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("pool", [20], indirect=True, ids=["20 s"])
def test_no_process_outlives_an_episode_that_the_kernel_ends(pool, tmp_path):
    """turn_seconds end long before the call's do."""
    pool, row, turn, _ = pool
    found = pool.step(row, Trajectory(turn(call("bad_a", file=str(tmp_path / "pids"))), "a:1")).result()
    assert found.excluded and "turn_seconds" in found.why
    assert_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_a_process_that_its_server_has_started_ends_with_it(tmp_path):
    """Also one with a session of its own, and where SIGTERM comes again and again, as of a parent with threads."""
    command = [sys.executable, "-I", "-S", mcp_process.__file__, str(os.getpid()), "999", "99"]
    server = ["sh", "-c", "setsid sleep 600 & echo $!; echo two >&2; read line"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for terminated in (False, True):
        with subprocess.Popen([*command, *server], **pipes) as process:
            pid = int(process.stdout.readline())
            if not terminated:
                process.stdin.close()
            while terminated and process.poll() is None:
                process.terminate()
            assert process.stdout.read() == b""
        assert process.returncode == 0
        assert_gone([pid])


KILLED = """
import os, sys, threading
from scalerl_jax.environments import Row
from scalerl_jax.environments.mcp_tools import McpServer

def wait():
    while not os.path.exists(sys.argv[2]):
        pass
    os.kill(os.getpid(), 9)

threading.Thread(target=wait, daemon=True).start()
server = McpServer(command=[sys.executable, "-S", sys.argv[1], "hangs"], seconds=600)
server.open(Row("q")).call("a", {"file": sys.argv[2]})
"""


@pytest.mark.slow
def test_no_process_outlives_one_that_is_killed(files, tmp_path):
    pids = tmp_path / "pids"
    done = subprocess.run([sys.executable, "-c", KILLED, files / "hostile.py", pids], check=False)
    assert done.returncode == -9
    assert_gone([int(pid) for pid in pids.read_text().split()])
