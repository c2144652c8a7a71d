"""Connections that nobody vouches for are closed, and no other."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator

import grpc
import pytest

from rollout_server import connections
from rollout_server.connections import Connections, parsed
from rollout_server.engines.engine import Engine
from scalerl_jax.contract import codec
from scalerl_jax.contract import rollout_pb2 as pb
from scalerl_jax.contract.rpc import Stub
from scalerl_jax.contract.security import Access, Credentials, connect
from tests.rollout_server.client import SECONDS, long_group, serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty settings: HTTP/2, and no call
TOKEN = "0123456789abcdef"


class Port:
    """One that accepts, in this process."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack, self.now = stack, 0.0
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.number = self._listener.getsockname()[1]
        self.connections = Connections(self.number, clock=lambda: self.now)
        stack.callback(self.connections.close)

    def dial(self) -> socket.socket:
        ours = self._stack.enter_context(socket.create_connection(("127.0.0.1", self.number)))
        self._stack.enter_context(self._listener.accept()[0])
        ours.settimeout(SECONDS)
        return ours


def peer(ours: socket.socket) -> str:
    return "ipv4:{}:{}".format(*ours.getsockname())


def ended(ours: socket.socket) -> bool:
    """Also where the other end still had something to say."""
    ours.setblocking(False)
    try:
        while ours.recv(2**16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.fixture
def port() -> Iterator[Port]:
    with contextlib.ExitStack() as stack:
        yield Port(stack)


def test_who_shows_no_call_in_time_is_closed(port: Port) -> None:
    silent, honest = port.dial(), port.dial()
    assert port.connections.tick() == 0
    port.connections.let_in(peer(honest))
    port.now = connections.UNKNOWN_SECONDS
    late = port.dial()
    assert port.connections.tick() == 0
    port.now += 1
    assert port.connections.tick() == 1
    assert [ended(one) for one in (silent, honest, late)] == [True, False, False]
    port.now += 10 * connections.UNKNOWN_SECONDS
    assert port.connections.tick() >= 1
    assert [ended(one) for one in (honest, late)] == [False, True]


def test_they_are_found_where_no_file_is_left_to_list_them(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(folder: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connections.os, "listdir", none_left)
    ours = port.dial()
    assert port.connections.tick() == 0
    port.now = 2 * connections.UNKNOWN_SECONDS
    assert port.connections.tick() == 1 and ended(ours)
    port.connections.close()
    port.connections.close()  # once more, as the fixture does too


def test_of_too_many_the_oldest_are_closed_at_once(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_UNKNOWN", 3)
    honest = port.dial()
    port.connections.let_in(peer(honest))
    many = []
    for _ in range(5):
        many.append(port.dial())
        port.connections.tick()
    assert [ended(one) for one in (*many, honest)] == [True, True, False, False, False, False]


def test_other_files_are_left_alone(port: Port) -> None:
    """The client's own end has another port, and whoever listens is no connection."""
    ours = port.dial()
    other, end = socket.socketpair()
    with other, end, socket.create_server(("127.0.0.1", 0)) as elsewhere:
        dialled = socket.create_connection(elsewhere.getsockname()[:2])
        theirs = elsewhere.accept()[0]
        with dialled, theirs:
            port.connections.tick()
            port.now = 10 * connections.UNKNOWN_SECONDS
            assert port.connections.tick() == 1 and ended(ours)
            assert not any(map(ended, (other, end, dialled, theirs)))
            port.dial()  # it still listens


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("ipv4:10.0.0.7:7000", ("10.0.0.7", 7000)),
        ("ipv6:%5B::1%5D:7000", ("::1", 7000)),
        ("ipv6:[::ffff:10.0.0.7]:7000", ("10.0.0.7", 7000)),
        ("ipv6:%5Bfe80::1%25eth0%5D:7000", ("fe80::1", 7000)),
        ("unix:/tmp/socket", None),
        ("ipv4:somewhere:1", None),
    ],
)
def test_a_peer_as_grpc_writes_it(text: str, known: tuple[str, int] | None) -> None:
    assert parsed(text) == known


async def test_a_flood_shuts_nobody_out_and_cuts_no_stream(
    make_replay: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent connections and refused calls end; a stream with the token goes on to its last completion."""
    access, credentials = Access(token=TOKEN), Credentials(token=TOKEN)
    async with serving(make_replay(), access, credentials) as served:
        connected = served.server._connections
        call = served.stub.Generate(codec.request_to_proto(long_group(tokens=100, incarnation=0)), timeout=SECONDS)
        first = asyncio.create_task(call.read())
        await served.status()
        stranger = connect(f"127.0.0.1:{served.server.port}", Credentials(token="f" * 16))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await Stub(stranger).Status(pb.StatusRequest(), timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        monkeypatch.setattr(connections, "UNKNOWN_SECONDS", 0.0)
        with contextlib.ExitStack() as stack:
            idle = []
            for i in range(100):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", served.server.port)))
                one.sendall(PREFACE * (i % 2))
                idle.append(one)
            async with asyncio.timeout(SECONDS):  # gRPC accepts them on threads of its own
                while not all(map(ended, idle)):
                    connected.tick()
                    await asyncio.sleep(0.01)
            assert await served.status()
            answers = 1 if await first else 0
            while await call.read() is not grpc.aio.EOF:
                answers += 1
            assert (answers, await call.code()) == (4, grpc.StatusCode.OK)
            assert len(connected._let_in) == 1
        await stranger.close()
